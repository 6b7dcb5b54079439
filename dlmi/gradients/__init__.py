"""Bias and variance of gradient estimators, against a truth that is known or knows its noise."""

from dlmi.gradient_rows import GradientRow, Statistic, read_gradient_rows
from dlmi.report.gradient_sets import KSTest, ks_tests, median_statistic

__all__ = [
    "GradientRow",
    "KSTest",
    "Statistic",
    "ks_tests",
    "median_statistic",
    "read_gradient_rows",
]
