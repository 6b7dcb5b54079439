"""Gradient rows in sets that measure the same thing, and the tests between their estimators."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from scipy import stats

from dlmi.gradient_rows import UNDEFINED, GradientRow, Statistic
from dlmi.report.blocks import ReportTable, block_texts


@dataclass(frozen=True)
class GradientSet:
    """Gradient rows that can be compared; the title says what they have in common."""

    title: str
    rows: tuple[GradientRow, ...]


class KSTest(NamedTuple):
    """A two-sided, two-sample Kolmogorov-Smirnov test of two estimators, by their labels."""

    statistic_name: str
    first: str
    second: str
    first_rows: int
    second_rows: int
    distance: float  # D, the largest one between the two distribution functions
    p_value: float  # under the assumption that all rows are independent
    adjusted_p_value: float  # after Holm's correction over all tests of the table


def gradient_sets(by_file: Sequence[Sequence[GradientRow]]) -> list[GradientSet]:
    """Rows of one LM, N, M, S, loss, decode, trajectory and kind of truth."""
    sets: dict[tuple[Any, ...], list[GradientRow]] = {}
    for rows in by_file:
        kinds = ", ".join(sorted({row.truth["kind"] for row in rows if row.truth is not None}))
        for row in rows:
            states = "its own run" if row.trajectory == "own" else f"a run of {row.trajectory}"
            title = (
                f"{row.model.rstrip('/').split('/')[-1]}, {row.dtype}, N={row.prompt_length}, "
                f"M={row.target_length}, S={row.num_samples}, {row.loss}, "
                f"{'teacher forcing' if row.teacher_forcing else 'free run'}; states of {states}"
                f"{'; truth: ' + kinds if kinds else ''}"
            )
            sets.setdefault((row.model, row.fingerprint, title), []).append(row)
    return [GradientSet(title, tuple(rows)) for (_, _, title), rows in sets.items()]


def values_of(rows: Sequence[GradientRow], statistic_name: str) -> dict[str, list[float]]:
    """All defined values of each estimator, in the order of the rows."""
    values: dict[str, list[float]] = {row.estimator: [] for row in rows}
    for row in rows:
        if (value := getattr(row, statistic_name).value) is not None:
            values[row.estimator].append(value)
    return values


def ks_tests(
    rows: Sequence[GradientRow], statistic_names: Sequence[str] = ("variance_max", "bias_max")
) -> list[KSTest]:
    """Test each pair of estimators, pooled over targets, seeds and steps as in the paper.

    Steps of one run are not independent, and estimators that are measured at the same states are
    paired: small p-values are then smaller than they should be. Pairs without values are left out.
    """
    tests = []
    for name in statistic_names:
        for (first, one), (second, other) in combinations(values_of(rows, name).items(), 2):
            if one and other:
                found = stats.ks_2samp(one, other)
                numbers = len(one), len(other), float(found.statistic), float(found.pvalue)
                tests.append(KSTest(name, first, second, *numbers, adjusted_p_value=1.0))
    adjusted = 0.0  # Holm's step-down correction
    order = sorted(range(len(tests)), key=lambda i: tests[i].p_value)
    for rank, i in enumerate(order):
        adjusted = max(adjusted, min(1.0, (len(tests) - rank) * tests[i].p_value))
        tests[i] = tests[i]._replace(adjusted_p_value=adjusted)
    return tests


def ks_table(sets: Sequence[GradientSet]) -> ReportTable:
    """The tests between estimators of each set."""
    names = ["measured on", "statistic", "first", "second", "rows of the first"]
    names += ["rows of the second", "D", "p", "p (Holm)"]
    rows = tuple((found.title, *test) for found in sets for test in ks_tests(found.rows))
    return ReportTable(*block_texts("ks_tests"), tuple(names), rows)


def median_statistic(rows: Sequence[GradientRow], label: str, statistic_name: str) -> Statistic:
    """Medians of an estimator's values and of the ends of their intervals.

    The interval is that of a typical row, not of the median: it says how well a row is known.
    """
    found: list[Statistic] = [getattr(r, statistic_name) for r in rows if r.estimator == label]
    found = [statistic for statistic in found if statistic.value is not None]
    if not found:
        return UNDEFINED
    value = statistics.median(s.value for s in found if s.value is not None)
    low = statistics.median_low(-math.inf if s.low is None else s.low for s in found)
    high = statistics.median_high(math.inf if s.high is None else s.high for s in found)
    ends = (end if math.isfinite(end) else None for end in (low, high))
    return Statistic(value, *ends)
