"""Numbers with confidence intervals, from leaving one draw out at a time."""

import math
from collections.abc import Callable, Sequence

import torch
from scipy import stats

from dlmi.gradient_rows import UNDEFINED, Statistic

CONFIDENCE = 0.95

Indices = Sequence[int]


def jackknife(
    statistic: Callable[[Indices, Indices], float], draws: int, blocks: int = 1
) -> Statistic:
    """A statistic of draws and of the truth's blocks, with an interval from leaving one out.

    Leaving one out keeps all pairs pairs of different draws. Drawing with replacement, as the
    bootstrap does, would pair draws with themselves and put the noise back that was subtracted.
    Draws and blocks are two independent samples, so their jackknife variances add up; the quantile
    is Student's, with the degrees of freedom of Welch and Satterthwaite. For maxima over logits
    the interval says how the reported number varies, not where the true maximum lies.

    The statistic is a function of the indices of draws and of blocks, nan where it is not defined.
    A single block is left as it is.
    """
    all_draws, all_blocks = list(range(draws)), list(range(blocks))
    value = statistic(all_draws, all_blocks)
    if not math.isfinite(value):
        return UNDEFINED
    replicates = [[statistic(_without(i, all_draws), all_blocks) for i in all_draws]]
    if blocks > 1:
        replicates.append([statistic(all_draws, _without(i, all_blocks)) for i in all_blocks])
    freedoms = [len(values) - 1 for values in replicates]
    variances = [
        float(torch.tensor(values, dtype=torch.float64).var(correction=0)) * (len(values) - 1)
        for values in replicates
    ]
    total = math.fsum(variances)
    if not math.isfinite(total):
        return Statistic(value, None, None)
    if total == 0:
        return Statistic(value, value, value)
    parts = zip(variances, freedoms, strict=True)
    freedom = total**2 / sum(variance**2 / free for variance, free in parts)
    low, high = stats.t.interval(CONFIDENCE, freedom, value, math.sqrt(total))
    return Statistic(value, float(low), float(high))


def _without(left_out: int, indices: Indices) -> list[int]:
    return [i for i in indices if i != left_out]


def exponential(logarithm: Statistic) -> Statistic:
    """Positive numbers are studied by their logarithm, so that no interval reaches below 0."""
    return _mapped(lambda x: math.exp(x) if x < 700 else math.inf, logarithm)


def square_root(square: Statistic) -> Statistic:
    """Of a square whose estimate may be negative: then 0."""
    return _mapped(lambda x: math.sqrt(max(x, 0.0)), square)


def _mapped(function: Callable[[float], float], statistic: Statistic) -> Statistic:
    ends = (statistic.value, statistic.low, statistic.high)
    mapped = [math.inf if end is None else function(end) for end in ends]
    return Statistic(*(end if math.isfinite(end) else None for end in mapped))
