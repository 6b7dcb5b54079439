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
    """A statistic of the indices of draws and of the truth's blocks, with a jackknife interval.

    The bootstrap would pair draws with themselves and put back the noise that was subtracted.
    Draws and blocks are two independent samples, so their jackknife variances add up; the quantile
    is Student's, with the degrees of freedom of Welch and Satterthwaite. For maxima over logits
    the interval says how the reported number varies, not where the true maximum lies.
    """
    all_draws, all_blocks = list(range(draws)), list(range(blocks))
    value = statistic(all_draws, all_blocks)
    if not math.isfinite(value):
        return UNDEFINED
    replicates = [[statistic(all_draws[:i] + all_draws[i + 1 :], all_blocks) for i in all_draws]]
    if blocks > 1:
        replicates.append(
            [statistic(all_draws, all_blocks[:i] + all_blocks[i + 1 :]) for i in all_blocks]
        )
    variances = [
        float(torch.tensor(values, dtype=torch.float64).var(correction=0)) * (len(values) - 1)
        for values in replicates
    ]
    total = math.fsum(variances)
    if not math.isfinite(total):
        return Statistic(value, None, None)
    if total == 0:
        return Statistic(value, value, value)
    parts = zip(variances, replicates, strict=True)
    freedom = total**2 / sum(variance**2 / (len(values) - 1) for variance, values in parts)
    low, high = stats.t.interval(CONFIDENCE, freedom, value, math.sqrt(total))
    return Statistic(value, float(low), float(high))


def exponential(logarithm: Statistic) -> Statistic:
    """From the statistic of a logarithm: its interval does not reach below 0."""
    return _mapped(lambda x: math.exp(x) if x < 700 else math.inf, logarithm)


def square_root(square: Statistic) -> Statistic:
    """From the statistic of a square; 0 where its estimate is negative."""
    return _mapped(lambda x: math.sqrt(max(x, 0.0)), square)


def _mapped(function: Callable[[float], float], statistic: Statistic) -> Statistic:
    ends = (statistic.value, statistic.low, statistic.high)
    mapped = [math.inf if end is None else function(end) for end in ends]
    return Statistic(*(end if math.isfinite(end) else None for end in mapped))
