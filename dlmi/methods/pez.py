r"""PEZ: descend on continuous embeddings, but always read the nearest tokens.

.. math::
    h_i = E_{n(i)}, \quad n(i) = \arg\max_v sim(P_i, E_v), \quad
    P \leftarrow P - \eta \, \nabla_h d(f(h_1 .. h_N), y)

Wen et al. 2023, "Hard Prompts Made Easy". The forward pass sees the projection of P onto the
vocabulary, so there is no soft-to-hard gap; the gradient at the projection is applied to P itself,
which is called Z here. The target is teacher-forced.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

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
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
        lr: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
    """

    metric: Metric = "cosine"
    loss: LossName = "cross_entropy"
    lr: float = 0.1
    weight_decay: float = 0.1

    reads_embeddings = True
    published = Defaults(steps=3000)
    ranges: ClassVar = {"weight_decay": "[0, inf)"}

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Z (N, d), the continuous prompt."""
        return {"Z": (length, vocabulary.matrix.shape[1])}

    def init(self, slot: Slot) -> None:
        """The embeddings of random tokens."""
        Z = slot.params["Z"]
        [ids] = slot.tokens.random_ids(1, slot.length, slot.rng)
        Z.copy_(slot.tokens.lm.embed(ids.to(Z.device)))

    def step(self, slot: Slot, state: None) -> Steps[tuple[Step, None]]:
        """The loss at the projection, whose gradient goes to Z."""
        Z = slot.params["Z"]
        projected = slot.tokens.lm.embed(self._nearest_ids(slot)).to(Z.dtype)
        scores = yield Pass(with_forward(Z, projected)[None], slot.examples, self.loss)
        return Step(scores.losses[0], scores.output_ids[0]), None

    def prompt_ids(self, slot: Slot, state: None) -> Tensor:
        """The nearest tokens."""
        return slot.tokens.repaired(self._nearest_ids(slot)[None])[0]

    @torch.no_grad()
    def _nearest_ids(self, slot: Slot) -> Tensor:
        """Of the tokens that a prompt may hold, the nearest to each position, (N,)."""
        Z = slot.params["Z"]
        near = nearness(Z, slot.tokens.vocabulary.matrix.to(Z.dtype), self.metric)  # (N, V)
        return slot.tokens.ids(slot.tokens.bar_(near).argmax(-1))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW on the continuous prompt."""
        return AdamW(parameters, self.lr, weight_decay=self.weight_decay, fused=True)
