"""Whether the draws of a sparse estimator are enough for a statistic.

An estimator that touches only the tokens it has sampled (score function, ReinMax) shows nothing of
a logit until its token is drawn: among 50 samples from 50,000 tokens no two agree, and the mean of
the draws looks like 0. How often samples agree follows from Z.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dlmi.gradients.truth import Truth

MIN_EVENTS = 10  # a smaller count is off by a third and more


@dataclass(frozen=True)
class SampleCoverage:
    """Expected numbers of coincidences among the samples of the draws."""

    pairs: float  # of samples from two draws that share a token at a position
    known_pairs: float = 0.0  # the same among the logits that the truth knows
    # Samples with a token of the truth, weighted by its squared gradient; pairs if it is sparse
    truth_hits: float = 0.0

    @property
    def shows_spread(self) -> bool:
        """Whether the draws are enough for norm and SNR."""
        return self.pairs >= MIN_EVENTS

    @property
    def shows_agreement(self) -> bool:
        """Whether the draws are enough for cosine and bias."""
        return min(self.known_pairs, self.truth_hits) >= MIN_EVENTS

    @classmethod
    def of(cls, logits: Tensor, draws: int, num_samples: int, truth: Truth | None) -> Self:
        """From Z, (N, V), by which the samples are drawn."""
        p = torch.softmax(logits.detach().double(), dim=-1).flatten()
        # Of a token that nearly all samples hold, its absence is the rare event.
        probabilities = torch.minimum(p, 1 - p)
        all_pairs = draws * (draws - 1) / 2 * num_samples**2
        pairs = all_pairs * float(probabilities.square().sum())
        if truth is None:
            return cls(pairs)
        known = truth.restrict(probabilities[None])[0]
        together = float(known.square().sum())
        if truth.kind in ("rloo", "as_in_code"):
            hits = truth.samples * together
        else:
            weights = truth.blocks.mean(0).double().square()
            hits = float((weights * known).sum() / weights.sum().clamp_min(1e-300))
        return cls(pairs, all_pairs * together, draws * num_samples * hits)
