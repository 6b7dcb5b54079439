r"""PEZ: descend on continuous embeddings, but always read the nearest tokens.

.. math::
    h_i = E_{n(i)}, \quad n(i) = \arg\max_v sim(P_i, E_v), \quad
    P \leftarrow P - \eta \, \nabla_h d(f(h_1 .. h_N), y)

Wen et al. 2023, "Hard Prompts Made Easy". The forward pass sees the projection of P onto the
vocabulary, so there is no soft-to-hard gap; the gradient at the projection is applied to P itself.
P is kept as Z here, with the width of an embedding in place of the vocabulary. The target is
teacher-forced. Unlike the relaxations there is no distribution over tokens and no noise.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dlmi.errors import check_between, check_positive
from dlmi.estimators.sampling import with_forward
from dlmi.methods.base import Defaults, Relaxation, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps
from dlmi.tokens.vocabulary import Vocabulary

Metric = Literal["cosine", "euclidean"]


def nearness(points: Tensor, matrix: Tensor, metric: Metric) -> Tensor:
    """How near each point is to each row of `matrix`: (..., d) and (V, d) to (..., V)."""
    products: Tensor = points @ matrix.T
    if metric == "cosine":
        # The points' own lengths do not change which row is nearest.
        lengths: Tensor = torch.linalg.vector_norm(matrix, dim=-1)
        return products / lengths.clamp_min(1e-12)
    return products - matrix.square().sum(-1) / 2


@dataclass(frozen=True)
class PEZ(Relaxation[None]):
    """Continuous prompt, projected onto the nearest tokens in every forward pass.

    Args:
        metric: What is near: `cosine` similarity or `euclidean` distance.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax), `hinge` or `mellowmax`
            (log mean exp of the tokens' cross-entropies: the worst token counts most).
        lr: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
    """

    metric: Metric = "cosine"
    loss: LossName = "cross_entropy"
    lr: float = 0.1
    weight_decay: float = 0.1

    reads_embeddings = True

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_positive("model.method", lr=self.lr)
        check_between("model.method", 0, math.inf, weight_decay=self.weight_decay)

    def defaults(self) -> Defaults:
        """As published."""
        return Defaults(steps=3000)

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Z (N, d), the continuous prompt."""
        return {"Z": (length, vocabulary.matrix.shape[1])}

    def init(self, slot: Slot) -> None:
        """The embeddings of random tokens."""
        [ids] = slot.tokens.random_ids(1, slot.length, slot.rng)
        slot.params["Z"].copy_(slot.tokens.lm.embed(ids.to(slot.params["Z"].device)))

    def step(self, slot: Slot, state: None) -> Steps[tuple[Step, None]]:
        """The loss at the projection, whose gradient goes to Z."""
        continuous = slot.params["Z"]
        nearest_ids = slot.tokens.ids(self._nearness(slot).argmax(-1))
        projected = slot.tokens.lm.embed(nearest_ids).to(continuous.dtype)
        scores = yield Pass(with_forward(continuous, projected)[None], slot.examples, self.loss)
        return Step(scores.losses[0], scores.output_ids[0]), None

    def prompt_ids(self, slot: Slot, state: None) -> Tensor:
        """The nearest tokens."""
        ids = slot.tokens.ids(self._nearness(slot).argmax(-1))
        return slot.tokens.repaired(ids[None])[0]

    @torch.no_grad()
    def _nearness(self, slot: Slot) -> Tensor:
        """How near each position is to each token that it may be, (N, V)."""
        continuous = slot.params["Z"]
        matrix = slot.tokens.vocabulary.matrix.to(continuous.dtype)
        return slot.tokens.bar_(nearness(continuous, matrix, self.metric))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW on the continuous prompt."""
        return AdamW(parameters, self.lr, weight_decay=self.weight_decay, fused=True)
