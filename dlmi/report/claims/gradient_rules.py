"""The paper's claims about gradient estimators, decided per target on logarithms.

The paper's statistics are the largest variance and bias of a logit, which shrink with the gradient
itself. So every claim is decided on scale-free ones, and the paper's stand beside them.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from dlmi.report.claims.verdicts import Finding, above, below, between, claim
from dlmi.report.estimates import Estimate, estimate
from dlmi.report.gradient_sets import GradientSet

# Labels of estimators as gradient rows have them.
REINFORCE = "REINFORCE"
FIXED_LOW, FIXED_HIGH = "GS tau=1", "GS tau=100"
LEARNED = ("GS L tau0=1", "GS L tau0=100", "GS D+L tau0=1", "GS D+L tau0=100")

_SAME_RANGE = 0.5  # decades

gradient_claim = partial(claim, kind="gradients")


@dataclass(frozen=True)
class GradientView:
    """Gradient rows through a pair of columns: one for variance and one for bias."""

    gradients: GradientSet
    variance: str
    bias: str

    def decades(
        self,
        first: str,
        second: str,
        column: str,
        summary: Callable[[list[float]], float] = statistics.fmean,
    ) -> list[tuple[str, Estimate]]:
        """log10 of a statistic of one estimator over another's, over targets, with its name.

        Args:
            first: Label of an estimator.
            second: Label of another.
            column: Which statistic.
            summary: What a target's steps and seeds come to.
        """
        one, other = (self._logs_by_target(label, column) for label in (first, second))
        shared = sorted(one.keys() & other.keys())
        found = estimate(summary(one[target]) - summary(other[target]) for target in shared)
        return [(f"log10 {column}, {first} over {second}", found)] if found else []

    def _logs_by_target(self, estimator: str, column: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for row in self.gradients.rows:
            value = getattr(row, column).value
            if row.estimator == estimator and value is not None and value > 0:
                found.setdefault(row.target_id, []).append(math.log10(value))
        return found


def gradient_views(gradients: GradientSet) -> tuple[list[GradientView], list[GradientView]]:
    """Through what is free of scale, and through what the paper looks at."""
    columns = (("relative_variance", "bias_over_norm"), ("variance_max", "bias_max"))
    ours, theirs = ([GradientView(gradients, *pair)] for pair in columns)
    return ours, theirs


@gradient_claim(
    "10",
    "REINFORCE has a higher variance than Gumbel-Softmax",
    metric="scale-free variance",
    needs="gradients of REINFORCE and GS",
)
def _reinforce_varies_most(view: GradientView) -> Iterator[Finding]:
    for other in (FIXED_LOW, FIXED_HIGH, *LEARNED):
        for found in view.decades(REINFORCE, other, view.variance):
            yield above(*found, margin=0)


@gradient_claim(
    "11",
    "A fixed tau of 100 has lower variance and bias than one of 1",
    metric="scale-free variance and bias",
    needs="gradients of GS at both",
)
def _high_tau_is_better(view: GradientView) -> Iterator[Finding]:
    for column in (view.variance, view.bias):
        for found in view.decades(FIXED_HIGH, FIXED_LOW, column):
            yield below(*found, 0.0)


@gradient_claim(
    "12a",
    "Learned temperatures (L, D+L) are in the range of fixed tau=1 (half a decade)",
    metric="scale-free variance and bias",
    needs="gradients of GS with learned temperatures",
)
def _learned_are_like_low_tau(view: GradientView) -> Iterator[Finding]:
    for learned in LEARNED:
        for column in (view.variance, view.bias):
            for found in view.decades(learned, FIXED_LOW, column):
                yield between(*found, -_SAME_RANGE, _SAME_RANGE)


@gradient_claim(
    "12b",
    "Their bias is the same for tau0 = 1 and 100 (within half a decade)",
    metric="scale-free bias",
    needs="gradients of GS at both tau0",
)
def _bias_ignores_tau0(view: GradientView) -> Iterator[Finding]:
    for low, high in (LEARNED[:2], LEARNED[2:]):
        for found in view.decades(high, low, view.bias):
            yield between(*found, -_SAME_RANGE, _SAME_RANGE)


@gradient_claim(
    "12c",
    "The range of their variance is smaller for tau0 = 1",
    metric="range of the log of the scale-free variance",
    needs="gradients of GS at both tau0",
)
def _range_is_smaller(view: GradientView) -> Iterator[Finding]:
    for low, high in (LEARNED[:2], LEARNED[2:]):
        for _, found in view.decades(high, low, view.variance, lambda v: max(v) - min(v)):
            yield above(f"decades of {view.variance}, {high} - {low}", found, margin=0)
