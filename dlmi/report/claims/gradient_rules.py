"""The paper's claims about gradient estimators, decided per target on logarithms.

The paper's statistics are the largest variance and bias of a logit, which shrink with the gradient
itself. So every claim is decided on scale-free ones, and the paper's stand beside them.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from dlmi.gradient_rows import GradientRow
from dlmi.report.claims.verdicts import Findings, above, below, between, decides
from dlmi.report.estimates import NamedEstimates, by_target, mean_gain
from dlmi.report.gradient_sets import GradientSet

# Labels of estimators as gradient rows have them.
REINFORCE = "REINFORCE"
FIXED_LOW, FIXED_HIGH = "GS tau=1", "GS tau=100"
LEARNED = ("GS L tau0=1", "GS L tau0=100", "GS D+L tau0=1", "GS D+L tau0=100")

_SAME_RANGE = 0.5  # decades


@dataclass(frozen=True)
class GradientView:
    """Gradient rows through a pair of columns."""

    gradients: GradientSet
    variance: str
    bias: str

    def decades(
        self,
        first: str,
        second: str,
        column: str,
        summary: Callable[[list[float]], float] = statistics.fmean,
    ) -> NamedEstimates:
        """log10 of one estimator's statistic over another's; `summary` is of a target's rows."""

        def logarithm(row: GradientRow) -> float | None:
            value: float | None = getattr(row, column).value
            return math.log10(value) if value is not None and value > 0 else None

        rows = self.gradients.rows
        one, other = (
            by_target((row for row in rows if row.estimator == label), logarithm, summary)
            for label in (first, second)
        )
        if found := mean_gain(other, one):
            yield f"log10 {column}, {first} over {second}", found


def gradient_views(gradients: GradientSet) -> tuple[list[GradientView], list[GradientView]]:
    """Through what is free of scale, and through what the paper looks at."""
    ours = GradientView(gradients, "relative_variance", "bias_over_norm")
    return [ours], [GradientView(gradients, "variance_max", "bias_max")]


@decides("10")
def _reinforce_varies_most(view: GradientView) -> Findings:
    for other in (FIXED_LOW, FIXED_HIGH, *LEARNED):
        for found in view.decades(REINFORCE, other, view.variance):
            yield above(*found, margin=0)


@decides("11")
def _high_tau_is_better(view: GradientView) -> Findings:
    for column in (view.variance, view.bias):
        for found in view.decades(FIXED_HIGH, FIXED_LOW, column):
            yield below(*found, 0.0)


@decides("12a")
def _learned_are_like_low_tau(view: GradientView) -> Findings:
    for learned in LEARNED:
        for column in (view.variance, view.bias):
            yield from _alike(view.decades(learned, FIXED_LOW, column))


@decides("12b")
def _bias_ignores_tau0(view: GradientView) -> Findings:
    for low, high in (LEARNED[:2], LEARNED[2:]):
        yield from _alike(view.decades(high, low, view.bias))


def _alike(ratios: NamedEstimates) -> Findings:
    return (between(*ratio, -_SAME_RANGE, _SAME_RANGE) for ratio in ratios)


@decides("12c")
def _range_is_smaller(view: GradientView) -> Findings:
    for low, high in (LEARNED[:2], LEARNED[2:]):
        for _, found in view.decades(high, low, view.variance, lambda v: max(v) - min(v)):
            yield above(f"decades of {view.variance}, {high} - {low}", found, margin=0)
