r"""AutoPrompt: one random position at a time, tried with the tokens that the gradient proposes.

.. math::
    i \sim U\{1 .. N\}, \quad C = top_k( -\langle e_v, \nabla_{e_{x_i}} d(f(x), y) \rangle ), \quad
    x_i \leftarrow \arg\min_{v \in C \cup \{x_i\}} d(f(x_{i \to v}), y)

Shin et al. 2020. GCG draws its candidates from all positions instead. The authors start from mask
tokens, which a causal LM does not have: here x starts from random tokens.
"""

from dataclasses import dataclass

import torch

from dlmi.methods.base import Search, Step
from dlmi.methods.candidates import PromptState, keep_best, swapped_at
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps, Swaps


@dataclass(frozen=True)
class AutoPrompt(Search[PromptState]):
    """Gradient-guided replacement of one token at a time.

    Args:
        topk: Tokens that a step tries at its position.
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
    """

    topk: int = 10
    loss: LossName = "cross_entropy"

    state_type = PromptState

    def step(self, slot: Slot, state: PromptState) -> Steps[tuple[Step, PromptState]]:
        """Replace the token at a random position, if another one is better."""
        x = state.prompt_ids
        i = int(torch.randint(slot.length, (1,), generator=slot.rng))
        own = torch.tensor([[i, int(x[i])]])  # the token itself is no swap
        swaps = Swaps(slot.tokens, self.topk, own)
        now = yield Pass(x[None], slot.examples, self.loss, swaps=swaps)
        assert now.swap_ids is not None  # (N, topk)
        candidates = slot.surviving(swapped_at(x, i, now.swap_ids[i]))
        step, x = yield from keep_best(slot, self.loss, x, now, candidates)
        return step, PromptState(x)
