r"""MAC: GCG whose swaps are proposed by the gradients of all steps so far.

.. math::
    m \leftarrow \mu m + \nabla_{e_x} d(f(x), y), \quad
    C_i = top_k( -\langle e_v, m_i \rangle ), \quad
    x \leftarrow \arg\min_{x' \in B} d(f(x'), y)

Zhang and Wei 2024, "Boosting Jailbreak Attack with Momentum". The gradient at one prompt says
little about the prompt one swap further; an average over steps is steadier. Everything else is GCG.
The momentum is kept with respect to embeddings, (N, d): that with respect to one-hot rows is its
product with the embedding matrix, so the top k are the same.
"""

from dataclasses import dataclass

from dlmi.errors import InputError
from dlmi.methods.gcg import GCG, GCGState
from dlmi.methods.slot import Slot
from dlmi.scoring.passes import Swaps


@dataclass(frozen=True)
class MAC(GCG):
    """Momentum-accelerated greedy coordinate gradient: all options of GCG, and one more.

    Args:
        search_width: Candidates per step.
        topk: Candidate tokens per position.
        n_replace: Positions changed in each candidate.
        buffer_size: 0: take the best candidate even if it is worse; 1: keep the current prompt
            unless a candidate is better; more: the same, from the best of that many random starts.
        first_prompt: The token "x" over and over (`x`, if it may be used), or `random` tokens.
        filter_ids: Drop candidates whose text does not encode to the same tokens again.
        loss: `cross_entropy`, `margin`, `hinge` or `mellowmax`.
        momentum: Weight of earlier gradients, above 0 and below 1.
    """

    momentum: float = 0.4

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        super().__post_init__()
        if not 0 < self.momentum < 1:
            raise InputError(
                "Expected `model.method.momentum` to be above 0 and below 1, but got "
                f"{self.momentum}. Without momentum, take GCG."
            )

    def _swaps(self, slot: Slot, state: GCGState) -> Swaps:
        """The gradient at x is added to what is left of those before."""
        return Swaps(slot.tokens, self.topk, momentum=self.momentum, carried=state.carried)
