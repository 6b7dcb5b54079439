r"""MAC: GCG whose swaps are proposed by the gradients of all steps so far.

.. math::
    m \leftarrow \mu m + \nabla_{e_x} d(f(x), y), \quad
    C_i = top_k( -\langle e_v, m_i \rangle ), \quad
    x \leftarrow \arg\min_{x' \in B} d(f(x'), y)

Zhang and Wei 2024, "Boosting Jailbreak Attack with Momentum". The momentum is kept with respect to
embeddings, (N, d): that with respect to one-hot rows is its product with the embedding matrix, so
the top k are the same.
"""

from dataclasses import dataclass
from typing import ClassVar

from dlmi.methods.gcg import GCG


@dataclass(frozen=True)
class MAC(GCG):
    """Momentum-accelerated greedy coordinate gradient: all options of GCG, and one more.

    Args:
        momentum: Weight of earlier gradients, above 0 and below 1.
    """

    momentum: float = 0.4

    ranges: ClassVar = {**GCG.ranges, "momentum": "(0, 1)"}
