"""Bias and variance of gradient estimators, against a gradient that is exact or has known noise."""
