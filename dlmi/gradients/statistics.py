r"""Bias and variance of an estimator from a few draws, with their noise subtracted.

From K draws g_i and T blocks r_t of the truth, all independent, everything scale-free follows from
their inner products. Pairs of different draws share no noise, so

.. math::
    u_g = mean_{i \ne j} \langle g_i, g_j \rangle, \quad
    c = mean_{i, t} \langle g_i, r_t \rangle, \quad
    u_r = mean_{s \ne t} \langle r_s, r_t \rangle

are unbiased for :math:`\|E g\|^2`, :math:`\langle E g, \nabla J \rangle` and
:math:`\|\nabla J\|^2`, while :math:`\|\bar g\|^2` is not: with few draws it is noise. Then

- variance :math:`s^2 = mean_i \|g_i\|^2 - u_g`, SNR :math:`\sqrt{u_g / s^2}`, relative variance
  :math:`s^2 / u_g`;
- cosine :math:`c / \sqrt{u_g u_r}`;
- squared bias :math:`u_g - 2 c + u_r`: the mean of <g_A - r_A, g_B - r_B> over all ways to split
  draws and blocks into halves A and B.

An estimator that touches only the tokens it has sampled (score function, ReinMax) shows nothing of
a logit until its token is drawn: among 50 samples from 50,000 tokens no two agree, and the mean of
the draws looks like 0. How often samples agree follows from Z (`expected_events`); where that is
rarely, statistics are left undefined.

Axes: K draws, T blocks, P logits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from dlmi.gradient_rows import STATISTICS, UNDEFINED, Statistic
from dlmi.gradients.truth import Truth

CONFIDENCE = 0.95
_HELD_COLUMNS = 2**20  # of the draws that are float64 at once
MIN_EVENTS = 10  # a smaller count is off by a third and more

Indices = Sequence[int]


def measure(
    gradients: Tensor, truth: Truth | None, events: tuple[float, float] = (math.inf, math.inf)
) -> dict[str, Statistic]:
    """All statistics of K draws, (K, N V); `events` are those of a sparse estimator.

    Variance, SNR and norm are over all logits; bias and cosine over those that the truth knows.
    """
    shows_spread, shows_agreement = (count >= MIN_EVENTS for count in events)
    products = inner_products(gradients, gradients)
    found = dict.fromkeys(STATISTICS, UNDEFINED) | {"variance_max": variance_max(gradients)}
    if shows_spread:
        found.update(spread(products))
    if truth is not None:
        known = truth.restrict(gradients)
        found["bias_max"] = bias_max(known, truth.blocks)
        if shows_agreement:
            own = products if truth.coordinates is None else inner_products(known, known)
            cross = inner_products(known, truth.blocks)
            found.update(agreement(own, cross, inner_products(truth.blocks, truth.blocks)))
    return found


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """(K, P) and (T, P) to (K, T), in float64, a part of P at a time."""
    parts = zip(*(torch.split(side, _HELD_COLUMNS, dim=1) for side in (left, right)), strict=True)
    total = torch.zeros(len(left), len(right), dtype=torch.float64)
    for a, b in parts:
        total += a.cpu().double() @ b.cpu().double().T
    return total


def squared_norm(products: Tensor, indices: Indices) -> float:
    """Unbiased squared norm of the mean of some draws; a single one is taken as exact."""
    part = products[indices][:, indices]
    count = len(indices)
    if count == 1:
        return float(part)
    return float((part.sum() - part.trace()) / (count * (count - 1)))


def spread(products: Tensor) -> dict[str, Statistic]:
    """SNR, relative variance and norm of the mean from the draws' inner products, (K, K)."""

    def squared_snr(draws: Indices, _: Indices) -> float:
        signal = squared_norm(products, draws)
        variance = float(products.diagonal()[draws].mean()) - signal
        return signal / variance if variance > 0 else math.inf

    squared = jackknife(squared_snr, len(products))
    norm = jackknife(lambda draws, _: squared_norm(products, draws), len(products))
    inverted = (squared.value, squared.high, squared.low)
    return {
        "snr": square_root(squared),
        "relative_variance": Statistic(*(1 / end if end and end > 0 else None for end in inverted)),
        "norm": square_root(norm),
    }


def agreement(own: Tensor, cross: Tensor, truth: Tensor) -> dict[str, Statistic]:
    """Cosine and relative bias from inner products (K, K), (K, T) and (T, T).

    Undefined where a norm in the denominator is not above its noise. The cosine is not clamped to
    [-1, 1]: an estimate of 1 has noise on both sides.
    """

    def cosine(draws: Indices, blocks: Indices) -> float:
        squares = squared_norm(own, draws), squared_norm(truth, blocks)
        if min(squares) <= 0:
            return math.nan
        return float(cross[draws][:, blocks].mean()) / math.sqrt(squares[0] * squares[1])

    def squared_bias(draws: Indices, blocks: Indices) -> float:
        square = squared_norm(truth, blocks)
        if square <= 0:
            return math.nan
        both = squared_norm(own, draws) - 2 * float(cross[draws][:, blocks].mean())
        return both / square + 1

    sizes = len(own), len(truth)
    is_true_seen = _is_above_zero(truth)
    is_seen = is_true_seen and _is_above_zero(own)
    bias = square_root(jackknife(squared_bias, *sizes)) if is_true_seen else UNDEFINED
    alignment = jackknife(cosine, *sizes) if is_seen else UNDEFINED
    return {"cosine": alignment, "bias_over_norm": bias}


def _is_above_zero(products: Tensor) -> bool:
    """Whether the norm of a mean is above its noise, by its interval or by that of the SNR."""
    if len(products) == 1:
        return float(products) > 0
    found = spread(products)
    return any((found[name].low or 0) > 0 for name in ("norm", "snr"))


def variance_max(gradients: Tensor) -> Statistic:
    """The largest unbiased variance of a logit over the draws, as in the paper: (K, P)."""
    return _largest(lambda draws, _: gradients[draws].var(0), len(gradients))


def bias_max(gradients: Tensor, blocks: Tensor) -> Statistic:
    """The largest |mean of the draws - truth| of a logit, as in the paper: (K, P) and (T, P).

    The noise of a maximum cannot be subtracted: for an unbiased estimator it is about
    sqrt(variance_max / K) and more. Compare it with that, and prefer `bias_over_norm`.
    """

    def bias(draws: Indices, known: Indices) -> Tensor:
        return (gradients[draws].mean(0) - blocks[known].mean(0)).abs()

    return _largest(bias, len(gradients), len(blocks))


def _largest(of_logits: Callable[[Indices, Indices], Tensor], *sizes: int) -> Statistic:
    """The largest value of a logit; by way of its logarithm, so that no interval is below 0."""

    def logarithm(draws: Indices, blocks: Indices) -> float:
        value = of_logits(draws, blocks).max()
        return math.log(value) if value > 0 else -math.inf

    return _mapped(lambda x: math.exp(x) if x < 700 else math.inf, jackknife(logarithm, *sizes))


def expected_events(
    logits: Tensor, draws: int, num_samples: int, truth: Truth | None
) -> tuple[float, float]:
    """How many events norm and SNR, and how many cosine and bias, are based on, from Z, (N, V).

    The first is the expected number of pairs of samples from two draws that share a token at a
    position. The second is that among the logits that the truth knows or, if it is smaller, the
    number of samples with a token of the truth, weighted by its squared gradient.
    """
    p = torch.softmax(logits.detach().double(), dim=-1).flatten()
    # Of a token that nearly all samples hold, its absence is the rare event.
    probabilities = torch.minimum(p, 1 - p)
    all_pairs = draws * (draws - 1) / 2 * num_samples**2
    pairs = all_pairs * float(probabilities.square().sum())
    if truth is None:
        return pairs, 0.0
    known = truth.restrict(probabilities[None])[0]
    together = float(known.square().sum())
    if truth.kind in ("rloo", "as_in_code"):  # sparse, too
        hits = truth.samples * together
    else:
        weights = truth.blocks.mean(0).double().square()
        hits = float((weights * known).sum() / weights.sum().clamp_min(1e-300))
    return pairs, min(all_pairs * together, draws * num_samples * hits)


def describe_truth(truth: Truth) -> dict[str, Any]:
    """How a truth was found, and its norm, as in a `GradientRow`."""
    blocks = range(len(truth.blocks))
    square = squared_norm(inner_products(truth.blocks, truth.blocks), list(blocks))
    return {
        "kind": truth.kind,
        "samples": truth.samples,
        "blocks": len(blocks),
        "coordinates": None if truth.coordinates is None else len(truth.coordinates),
        "norm": math.sqrt(square) if square > 0 else None,
    }


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


def square_root(square: Statistic) -> Statistic:
    """From the statistic of a square; 0 where its estimate is negative."""
    return _mapped(lambda x: math.sqrt(max(x, 0.0)), square)


def _mapped(function: Callable[[float], float], statistic: Statistic) -> Statistic:
    ends = (statistic.value, statistic.low, statistic.high)
    mapped = [math.inf if end is None else function(end) for end in ends]
    return Statistic(*(end if math.isfinite(end) else None for end in mapped))
