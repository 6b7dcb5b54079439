"""A soft prompt: a distribution over tokens at each position, and how samples of it are drawn.

Axes: S samples, N prompt tokens, V tokens a prompt may hold, d width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.estimators.sampling import EstimatorName, held_embeds
from dlmi.estimators.soft_embedding import sample_columns, soft_embedding


@dataclass(frozen=True, eq=False)
class SoftPrompt:
    """Distributions over tokens, and the samples that a pass reads of them."""

    logits: Tensor  # Z, (N, V)
    tau: Tensor  # temperatures, (N,)
    # How samples are drawn and differentiated; None: softmax(Z / tau), without noise
    estimator: EstimatorName | None = None
    samples: int = 1  # how many are drawn, S
    seed: int = 0  # of their noise
    rao_draws: int = 10  # conditional draws of each sample of `gumbel_rao`

    def hard_columns(self, count: int, seed: int) -> Tensor:
        """Discrete prompts as the method would draw them, (count, N).

        The largest entry of a Gumbel sample does not depend on tau, that of a plain softmax does.
        """
        logits = self.logits if self.estimator else self.logits / self.tau[:, None]
        return sample_columns(logits, count, seed)


def soft_embeds(prompts: Sequence[SoftPrompt], matrix: Tensor) -> list[Tensor]:
    """Embeddings of the samples of several soft prompts, (S, N, d) each, by a matrix, (V, d).

    Prompts that are drawn in the same way share one product with the matrix.
    """
    alike: dict[object, list[int]] = {}
    for i, prompt in enumerate(prompts):
        kind = (prompt.estimator, prompt.samples, prompt.rao_draws, prompt.logits.shape)
        alike.setdefault(kind, []).append(i)
    embeds: dict[int, Tensor] = {}
    for members in alike.values():
        same = [prompts[i] for i in members]
        made: Iterable[Tensor]
        if (estimator := same[0].estimator) in ("gumbel_rao", "reinmax"):
            made = [
                held_embeds(estimator, p.logits, p.tau, matrix, p.seed, p.samples, p.rao_draws)
                for p in same
            ]
        else:
            made = soft_embedding(
                [p.logits for p in same],
                torch.stack([p.tau for p in same]),  # (B, N)
                matrix,
                [p.seed for p in same] if estimator else None,
                same[0].samples if estimator else 1,
                hard=estimator == "straight_through",
            )
        embeds.update(zip(members, made, strict=True))
    return [embeds[i] for i in range(len(prompts))]
