"""A soft prompt: a distribution over tokens at each position, and how samples of it are drawn.

Axes: S samples, N prompt tokens, V tokens a prompt may hold, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlmi.estimators.noise import gumbel_noise
from dlmi.estimators.sampling import EstimatorName, gumbel_rao, reinmax
from dlmi.estimators.soft_embedding import sample_columns, soft_embedding

_HELD_ENTRIES = 2**22  # of rows that are held at once: 16 MiB in float32


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
        estimator = same[0].estimator
        if estimator in ("gumbel_rao", "reinmax"):
            embeds.update((i, _held_embeds(prompts[i], matrix)) for i in members)
            continue
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


def _held_embeds(prompt: SoftPrompt, matrix: Tensor) -> Tensor:
    """Embeddings of samples whose rows are held, for a few positions at a time, (S, N, d)."""
    logits, samples, draws = prompt.logits, prompt.samples, prompt.rao_draws
    chosen = sample_columns(logits, samples, prompt.seed)  # (S, N)
    width = max(1, _HELD_ENTRIES // (samples * draws * logits.shape[1]))

    def embeds(first: int, part: Tensor, tau: Tensor) -> Tensor:
        part_chosen = chosen[:, first : first + width]
        if prompt.estimator == "reinmax":
            rows = reinmax(part, tau, part_chosen)
        else:
            # A stream of its own: the draw above has used the seed's.
            shape, like = (draws * samples, *part.shape), (part.device, part.dtype)
            noise = gumbel_noise(prompt.seed + 1, shape, *like, first)
            rows = gumbel_rao(part, tau, part_chosen, noise.view(draws, samples, *part.shape))
        return rows @ matrix.to(rows.dtype)

    # The rows are made again in the backward pass; their noise is, too, from its counter.
    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [
        checkpoint(embeds, i, logits[i : i + width], prompt.tau[i : i + width], **again)
        for i in range(0, len(logits), width)
    ]
    return torch.cat(parts, dim=1)
