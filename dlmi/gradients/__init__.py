"""Bias and variance of gradient estimators, against a truth that is known or knows its noise."""

from dlmi.gradients.comparison import KSTest, ks_tests, median_statistic
from dlmi.gradients.intervals import Statistic
from dlmi.gradients.rows import GradientRow, read_gradient_rows

__all__ = [
    "GradientRow",
    "KSTest",
    "Statistic",
    "ks_tests",
    "median_statistic",
    "read_gradient_rows",
]
