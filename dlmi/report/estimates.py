"""Means over targets with their standard errors, and the differences that claims are decided on.

Seeds of one target are not independent of each other: the target is as hard for all of them. So
seeds are averaged first, and errors are over targets.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from scipy import stats

from dlmi.gradient_rows import GradientRow
from dlmi.report.loading import Series, best_point, points_within
from dlmi.report.result_files import Budget
from dlmi.rows import Inversion

# A number of a row; NaN where the row has none.
Measure = Callable[[Inversion], float]

MIN_TARGETS = 3  # for an interval

_Row = TypeVar("_Row", Inversion, GradientRow)


@dataclass(frozen=True)
class Estimate:
    """A mean over targets with its standard error; false without any target."""

    mean: float
    error: float | None  # None for a single target
    freedom: float  # degrees of freedom of the error
    targets: int

    def __bool__(self) -> bool:
        return self.targets > 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Student's confidence interval; infinite with fewer than `MIN_TARGETS` targets."""
        if self.error is None or self.targets < MIN_TARGETS:
            return -math.inf, math.inf
        reach = float(stats.t.ppf((1 + confidence) / 2, self.freedom)) * self.error
        return self.mean - reach, self.mean + reach


NamedEstimates = Iterator[tuple[str, Estimate]]


def honest_lcs(budget: Budget) -> Measure:
    """LCS of the best discrete prompt within a budget, decoded freely."""
    return lambda row: best_point(row, budget).lcs


def current_lcs(budget: Budget) -> Measure:
    """LCS of the discrete prompt at the last evaluation within a budget, not of the best one."""
    return lambda row: points_within(row, budget)[-1].lcs


def as_in_code_lcs(budget: Budget) -> Measure:
    """LCS as the DLMI authors' code logs it, at the last evaluation within a budget."""
    return lambda row: known(points_within(row, budget)[-1].as_in_code_lcs)


def known(value: float | None) -> float:
    """NaN for None."""
    return math.nan if value is None else value


def by_target(
    rows: Iterable[_Row],
    measure: Callable[[_Row], float],
    summary: Callable[[list[float]], float] = statistics.fmean,
) -> dict[str, float]:
    """The mean, or another summary, of each target's rows; only finite values count."""
    found = defaultdict(list)
    for row in rows:
        if math.isfinite(value := measure(row)):
            found[row.target_id].append(value)
    return {target: summary(values) for target, values in found.items()}


def estimate(values: Iterable[float]) -> Estimate:
    """Mean and standard error of values, one per target."""
    values = list(values)
    error = float(stats.sem(values)) if len(values) > 1 else None
    mean = statistics.fmean(values) if values else math.nan
    return Estimate(mean, error, len(values) - 1, len(values))


def mean_over_targets(rows: Iterable[Inversion], measure: Measure) -> Estimate:
    """Mean over targets, seeds averaged first."""
    return estimate(by_target(rows, measure).values())


def differences(
    first: Iterable[Inversion], second: Iterable[Inversion], measure: Measure
) -> dict[str, float]:
    """First minus second for each target, over the seeds that both have."""
    others = {(r.target_id, r.seed): measure(r) for r in second}
    return by_target(first, lambda r: measure(r) - others.get((r.target_id, r.seed), math.nan))


def mean_gain(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """After minus before, over the targets that both have."""
    return estimate(after[target] - before[target] for target in before if target in after)


def slope(points: Sequence[tuple[float, float]]) -> Estimate:
    """Change of y over the whole range of x along the least-squares line."""
    xs = [x for x, _ in points]
    if len(points) < 3 or len(set(xs)) < 2:
        return estimate([])
    line = stats.linregress(xs, [y for _, y in points])
    reach = max(xs) - min(xs)
    return Estimate(line.slope * reach, line.stderr * reach, len(points) - 2, len(points))


def unpaired(first: Iterable[float], second: Iterable[float]) -> Estimate:
    """First minus second where the targets are not the same ones (Welch)."""
    one, other = estimate(first), estimate(second)
    difference, targets = one.mean - other.mean, min(one.targets, other.targets)
    if one.error is None or other.error is None:
        return Estimate(difference, None, 0, targets)
    total = one.error**2 + other.error**2
    bottom = one.error**4 / one.freedom + other.error**4 / other.freedom
    freedom = total**2 / bottom if bottom else one.freedom + other.freedom
    return Estimate(difference, math.sqrt(total), freedom, targets)


@dataclass(frozen=True)
class Summary:
    """The results of a series within a budget, as cards and tables show them."""

    exact_rows: int
    exact: Estimate
    lcs: Estimate
    loss: Estimate  # teacher-forced cross-entropy of the best discrete prompt, per token
    as_in_code: Estimate
    seconds: Estimate
    token_passes: Estimate


def summarise(series: Series, budget: Budget) -> Summary:
    """The results of a series within a budget."""
    mean = partial(mean_over_targets, series.rows)
    return Summary(
        exact_rows=sum(best_point(row, budget).lcs == 1 for row in series.rows),
        exact=mean(lambda row: float(best_point(row, budget).lcs == 1)),
        lcs=mean(honest_lcs(budget)),
        loss=mean(lambda row: best_point(row, budget).discrete_loss),
        as_in_code=mean(as_in_code_lcs(budget)),
        seconds=mean(lambda row: points_within(row, budget)[-1].seconds),
        token_passes=mean(lambda row: points_within(row, budget)[-1].token_passes),
    )
