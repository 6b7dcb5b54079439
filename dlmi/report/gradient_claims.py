"""The paper's claims about gradient estimators, decided per target on logarithms.

The paper's statistics are the largest variance and bias of a logit, which shrink with the gradient
itself. So every claim is decided on scale-free ones, and the paper's stand beside them.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dlmi.report.estimates import Estimate, estimate
from dlmi.report.gradient_sets import GradientSet
from dlmi.report.verdicts import Finding, Outcome, above, below, between, decide

# Labels of estimators as gradient rows have them.
REINFORCE = "REINFORCE"
FIXED_LOW, FIXED_HIGH = "GS tau=1", "GS tau=100"
LEARNED = ("GS L tau0=1", "GS L tau0=100", "GS D+L tau0=1", "GS D+L tau0=100")

_SAME_RANGE = 0.5  # decades

# Columns of variance and bias: free of scale, and as in the paper.
Columns = tuple[str, str]
SCALE_FREE: Columns = ("relative_variance", "bias_over_norm")
AS_IN_PAPER: Columns = ("variance_max", "bias_max")


@dataclass(frozen=True, kw_only=True)
class GradientClaim:
    """A claim and its rule.

    Attributes:
        number: In the checklist.
        statement: In short.
        metric: What it is decided on.
        rule: Findings of a set of rows in a pair of columns.
        needs: Which estimators it takes.
    """

    number: str
    statement: str
    metric: str
    rule: Callable[[GradientSet, Columns], Iterator[Finding]]
    needs: str

    def decide(self, gradients: GradientSet) -> tuple[Outcome, Outcome]:
        """On scale-free statistics, and on the paper's."""
        return (
            decide(list(self.rule(gradients, SCALE_FREE))),
            decide(list(self.rule(gradients, AS_IN_PAPER))),
        )


def decades(
    gradients: GradientSet,
    first: str,
    second: str,
    column: str,
    summary: Callable[[list[float]], float] = statistics.fmean,
) -> Estimate | None:
    """log10 of first over second, over targets.

    Args:
        gradients: The rows.
        first: Label of an estimator.
        second: Label of another.
        column: Which statistic.
        summary: What a target's steps and seeds come to.
    """
    logs = [_logs_by_target(gradients, estimator, column) for estimator in (first, second)]
    shared = sorted(logs[0].keys() & logs[1].keys())
    return estimate(summary(logs[0][target]) - summary(logs[1][target]) for target in shared)


def _logs_by_target(gradients: GradientSet, estimator: str, column: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in gradients.rows:
        value = getattr(row, column).value
        if row.estimator == estimator and value is not None and value > 0:
            found.setdefault(row.target_id, []).append(math.log10(value))
    return found


def _reinforce_varies_most(gradients: GradientSet, columns: Columns) -> Iterator[Finding]:
    for other in (FIXED_LOW, FIXED_HIGH, *LEARNED):
        if found := decades(gradients, REINFORCE, other, columns[0]):
            yield above(f"log10 {columns[0]}, {REINFORCE} over {other}", found, margin=0)


def _high_tau_is_better(gradients: GradientSet, columns: Columns) -> Iterator[Finding]:
    for column in columns:
        if found := decades(gradients, FIXED_HIGH, FIXED_LOW, column):
            yield below(f"log10 {column}, {FIXED_HIGH} over {FIXED_LOW}", found, 0.0)


def _learned_are_like_low_tau(gradients: GradientSet, columns: Columns) -> Iterator[Finding]:
    for learned in LEARNED:
        for column in columns:
            if found := decades(gradients, learned, FIXED_LOW, column):
                name = f"log10 {column}, {learned} over {FIXED_LOW}"
                yield between(name, found, -_SAME_RANGE, _SAME_RANGE)


def _bias_ignores_tau0(gradients: GradientSet, columns: Columns) -> Iterator[Finding]:
    for low, high in (LEARNED[:2], LEARNED[2:]):
        if found := decades(gradients, high, low, columns[1]):
            name = f"log10 {columns[1]}, {high} over {low}"
            yield between(name, found, -_SAME_RANGE, _SAME_RANGE)


def _range_is_smaller(gradients: GradientSet, columns: Columns) -> Iterator[Finding]:
    for low, high in (LEARNED[:2], LEARNED[2:]):
        if found := decades(gradients, high, low, columns[0], _reach):
            yield above(f"decades of {columns[0]}, {high} - {low}", found, margin=0)


def _reach(values: list[float]) -> float:
    return max(values) - min(values)


GRADIENT_CLAIMS = (
    GradientClaim(
        number="10",
        statement="REINFORCE has a higher variance than Gumbel-Softmax",
        metric="scale-free variance",
        rule=_reinforce_varies_most,
        needs="gradients of REINFORCE and GS",
    ),
    GradientClaim(
        number="11",
        statement="A fixed tau of 100 has lower variance and bias than one of 1",
        metric="scale-free variance and bias",
        rule=_high_tau_is_better,
        needs="gradients of GS at both",
    ),
    GradientClaim(
        number="12a",
        statement="Learned temperatures (L, D+L) are in the range of fixed tau=1 (half a decade)",
        metric="scale-free variance and bias",
        rule=_learned_are_like_low_tau,
        needs="gradients of GS with learned temperatures",
    ),
    GradientClaim(
        number="12b",
        statement="Their bias is the same for tau0 = 1 and 100 (within half a decade)",
        metric="scale-free bias",
        rule=_bias_ignores_tau0,
        needs="gradients of GS at both tau0",
    ),
    GradientClaim(
        number="12c",
        statement="The range of their variance is smaller for tau0 = 1",
        metric="range of the log of the scale-free variance",
        rule=_range_is_smaller,
        needs="gradients of GS at both tau0",
    ),
)
