"""Whether the draws of a sparse estimator are enough for a statistic.

An estimator that touches only the tokens it has sampled (score function, ReinMax) shows nothing of
a logit until its token is drawn: among 50 samples from 50,000 tokens no two agree, and the mean of
the draws looks like 0. How often samples agree follows from Z.
"""

import torch
from torch import Tensor

from dlmi.gradients.truth import Truth

MIN_EVENTS = 10  # a smaller count is off by a third and more


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
