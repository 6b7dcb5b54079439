r"""PEZ: descend on continuous embeddings, but always read the nearest tokens.

.. math::
    h_i = E_{n(i)}, \quad n(i) = \arg\max_v sim(P_i, E_v), \quad
    P \leftarrow P - \eta \, \nabla_h d(f(h_1 .. h_N), y)

Wen et al. 2023, "Hard Prompts Made Easy". The forward pass sees the projection of P onto the
vocabulary, so there is no soft-to-hard gap; the gradient at the projection is applied to P itself.
P is kept as Z here, with the width of an embedding in place of the vocabulary. The target is
teacher-forced. Unlike the relaxations there is no distribution over tokens and no noise.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from dlmi.errors import InputError, check_positive
from dlmi.estimators import with_forward
from dlmi.inverter import Inverter
from dlmi.losses import LossName
from dlmi.passes import StepLosses, target_pass
from dlmi.slots import Slot
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens

Metric = Literal["cosine", "euclidean"]


def nearness(points: Tensor, matrix: Tensor, metric: Metric) -> Tensor:
    """How near each point is to each row of `matrix`: (..., d) and (V, d) to (..., V)."""
    products: Tensor = points @ matrix.T
    if metric == "cosine":
        # The points' own lengths do not change which row is nearest.
        lengths: Tensor = torch.linalg.vector_norm(matrix, dim=-1)
        return products / lengths.clamp_min(1e-12)
    return products - matrix.square().sum(-1) / 2


class PEZ(Inverter):
    """Continuous prompt, projected onto the nearest tokens in every forward pass.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        metric: What nearest means: `cosine` or `euclidean`.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax) or `hinge`.
        lr: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
        eval_every: Steps between two greedy decodes of the discrete prompt.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        norm_gradient_scale: Factor on gradients at the LM's norm layers; 1 leaves them alone.
        refine_after: Share of the budget after which the best discrete prompt is refined by
            swaps (`dlmi.refinement`); 1 for never.
        refine_width: Swaps that a step of the refinement tries.
        seed: With the target's id it fixes the start. On the command line: `seed_everything`.
    """

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 3000,
        token_budget: int | None = None,
        metric: Metric = "cosine",
        loss: LossName = "cross_entropy",
        lr: float = 0.1,
        weight_decay: float = 0.1,
        eval_every: int = 16,
        prompt_bos: bool = False,
        allowed_tokens: AllowedTokens = "all",
        forbid_target_tokens: ForbiddenTokens = "none",
        norm_gradient_scale: float = 1.0,
        refine_after: float = 1.0,
        refine_width: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(
            prompt_length,
            steps,
            token_budget,
            eval_every,
            prompt_bos,
            allowed_tokens,
            forbid_target_tokens,
            seed,
        )
        self.set_norm_gradient_scale(norm_gradient_scale)
        self.set_refinement(refine_after, refine_width)
        check_positive("model", lr=lr)
        if weight_decay < 0:
            raise InputError(
                f"Expected `model.weight_decay` to be at least 0, but got {weight_decay}."
            )
        self.metric: Metric = metric
        self.loss: LossName = loss
        self.lr = lr
        self.weight_decay = weight_decay

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, d), the continuous prompt."""
        return {"Z": (self.prompt_length, self.lm.embedding_matrix.shape[1])}

    def initialise(self, slot: Slot) -> None:
        """The embeddings of random tokens."""
        allowed = self.vocabulary.allowed_columns(slot.target)
        device = slot.generator.device
        picks = torch.randint(
            len(allowed), (self.prompt_length,), generator=slot.generator, device=device
        )
        self.Z[slot.index].copy_(self.vocabulary.matrix[allowed[picks]])

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """The loss at the projection, whose gradient goes to Z."""
        continuous = torch.stack([self.Z[slot.index] for slot in slots])  # (B, N, d)
        projected = self.lm.embed(self._nearest_ids(slots)).to(continuous.dtype)
        embeds = with_forward(continuous, projected)[:, None]  # (B, 1, N, d)
        losses, output_ids = target_pass(
            self.lm, slots, embeds, self.loss, prompt_bos=self.prompt_bos
        )
        return StepLosses(losses[:, 0], output_ids[:, 0])

    def token_passes_per_step(self, target_length: int) -> int:
        """One prompt, forward and backward."""
        return 2 * (self.prompt_length + target_length - 1)

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The nearest tokens, (B, N)."""
        rows = zip(slots, self._nearest_ids(slots), strict=True)
        return torch.cat([self.mended(slot, ids[None]) for slot, ids in rows])

    @torch.no_grad()
    def _nearest_ids(self, slots: Sequence[Slot]) -> Tensor:
        continuous = torch.stack([self.Z[slot.index] for slot in slots])
        matrix = self.vocabulary.matrix.to(continuous.dtype)
        scores = nearness(continuous, matrix, self.metric)  # (B, N, V)
        for slot, mine in zip(slots, scores, strict=True):
            self.vocabulary.bar_(mine, slot.target)
        return self.vocabulary.ids(scores.argmax(-1))

    def configure_optimizers(self) -> Optimizer:
        """AdamW on the continuous prompt."""
        return AdamW(self.parameters(), self.lr, weight_decay=self.weight_decay, fused=True)
