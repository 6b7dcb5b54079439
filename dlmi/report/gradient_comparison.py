"""Estimators side by side: medians over all rows, and Kolmogorov-Smirnov tests of each pair."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy import stats

from dlmi.gradient_rows import UNDEFINED, GradientRow, Statistic


@dataclass(frozen=True)
class KSTest:
    """A two-sided, two-sample Kolmogorov-Smirnov test of two estimators, by their labels."""

    statistic_name: str
    first: str
    second: str
    distance: float  # the largest one between the two distribution functions, D
    p_value: float  # if all rows were independent and equally distributed
    adjusted_p_value: float  # after Holm's correction over all tests of the table
    sizes: tuple[int, int]  # rows of each


def labels_of(rows: Sequence[GradientRow]) -> list[str]:
    """The estimators of some rows, in the order in which they come."""
    return list(dict.fromkeys(row.estimator for row in rows))


def values_of(rows: Sequence[GradientRow], label: str, statistic_name: str) -> list[float]:
    """All defined values of an estimator."""
    found = (getattr(row, statistic_name).value for row in rows if row.estimator == label)
    return [value for value in found if value is not None]


def ks_tests(
    rows: Sequence[GradientRow], statistic_names: Sequence[str] = ("variance_max", "bias_max")
) -> list[KSTest]:
    """Test each pair of estimators, pooled over targets, seeds and steps as in the paper.

    Steps of one run are not independent, and estimators that are measured at the same states are
    paired: small p-values are then smaller than they should be. Pairs without values are left out.
    """
    tests = []
    for name in statistic_names:
        for pair in itertools.combinations(labels_of(rows), 2):
            one, other = (values_of(rows, label, name) for label in pair)
            if one and other:
                found = stats.ks_2samp(one, other)
                p_value, sizes = float(found.pvalue), (len(one), len(other))
                tests.append(KSTest(name, *pair, float(found.statistic), p_value, 1.0, sizes))
    adjusted = 0.0  # Holm's step-down correction
    order = sorted(range(len(tests)), key=lambda i: tests[i].p_value)
    for rank, i in enumerate(order):
        adjusted = max(adjusted, min(1.0, (len(tests) - rank) * tests[i].p_value))
        tests[i] = replace(tests[i], adjusted_p_value=adjusted)
    return tests


def median_statistic(
    rows: Sequence[GradientRow], label: str, statistic_name: str
) -> tuple[Statistic, int]:
    """Medians of an estimator's values and of the ends of their intervals, and how many it has.

    The interval is that of a typical row, not of the median: it says how well a row is known.
    """
    found: list[Statistic] = [getattr(r, statistic_name) for r in rows if r.estimator == label]
    found = [statistic for statistic in found if statistic.value is not None]
    if not found:
        return UNDEFINED, 0
    lows = [-math.inf if s.low is None else s.low for s in found]
    highs = [math.inf if s.high is None else s.high for s in found]
    ends = [statistics.median_low(lows), statistics.median_high(highs)]
    value = statistics.median(s.value for s in found if s.value is not None)
    return Statistic(value, *(end if math.isfinite(end) else None for end in ends)), len(found)
