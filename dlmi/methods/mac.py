r"""MAC: GCG whose swaps are proposed by the gradients of all steps so far.

.. math::
    g_i = \frac{E \nabla_{e_{x_i}} d(f(x), y)}{|E \nabla_{e_{x_i}} d(f(x), y)|}, \quad
    m \leftarrow \mu m + (1 - \mu) g, \quad
    C_i = top_k( -m_i ), \quad
    x \leftarrow \arg\min_{x' \in B} d(f(x'), y)

Zhang and Wei 2024, "Boosting Jailbreak Attack with Momentum", as in the public code: m is g at the
first step, the candidates B are spread evenly over the positions, and the best of them is taken
even if it is worse than x. The momentum is kept with respect to embeddings, (N, d), as that with
respect to one-hot rows is its product with the matrix E of all embeddings a prompt may hold.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dlmi.methods.gcg import GCG
from dlmi.methods.slot import Slot


@dataclass(frozen=True)
class MAC(GCG):
    """Momentum-accelerated greedy coordinate gradient: all options of GCG, and one more.

    Args:
        momentum: Weight of earlier gradients, above 0 and below 1.
    """

    buffer_size: int = 0
    momentum: float = 0.4

    ranges: ClassVar = {**GCG.ranges, "momentum": "(0, 1)"}

    def positions(self, slot: Slot) -> Tensor:
        """Spread evenly, from a random first one so that few candidates reach all positions."""
        count = self.search_width * self.n_replace
        spread = torch.arange(count) * slot.length // count
        first = torch.randint(slot.length, (), generator=slot.rng)
        return ((spread + first) % slot.length).view(self.n_replace, -1).T

    def candidates(self, slot: Slot, x: Tensor, likely_ids: Tensor) -> Tensor:
        """As GCG's, without x itself."""
        ids = super().candidates(slot, x, likely_ids)
        return ids[(ids != x).any(-1)]
