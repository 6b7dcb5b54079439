r"""AutoPrompt: one random position at a time, tried with the tokens that the gradient likes there.

.. math::
    i \sim U\{1 .. N\}, \quad C = top_k( -\langle e_v, \nabla_{e_{x_i}} d(f(x), y) \rangle ), \quad
    x_i \leftarrow \arg\min_{v \in C \cup \{x_i\}} d(f(x_{i \to v}), y)

Shin et al. 2020. It came before GCG, which differs in one thing: GCG draws its candidates from all
positions at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.errors import check_at_least_one
from dlmi.methods.base import Defaults, Search, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import NO_SWAP, Pass, Steps, Swaps


@dataclass
class AutoPromptState:
    """What is kept between steps."""

    prompt_ids: Tensor  # x, (N,)


@dataclass(frozen=True)
class AutoPrompt(Search[AutoPromptState]):
    """Gradient-guided replacement of one token at a time.

    Args:
        topk: Tokens that a step tries at its position.
        loss: `cross_entropy`, `margin`, `hinge` or `mellowmax`.
    """

    topk: int = 10
    loss: LossName = "cross_entropy"

    state_type = AutoPromptState

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_at_least_one("model.method", topk=self.topk)

    def defaults(self) -> Defaults:
        """No special tokens, as in the authors' code."""
        return Defaults(steps=500, eval_every=None, token_sets=("no_special",))

    def starts(self, slot: Slot) -> Tensor:
        """Random tokens: a causal LM has no mask token to start from."""
        return slot.tokens.random_ids(1, slot.length, slot.rng)

    def begin(self, slot: Slot, prompt_ids: Tensor) -> AutoPromptState:
        """From x."""
        return AutoPromptState(prompt_ids)

    def step(self, slot: Slot, state: AutoPromptState) -> Steps[tuple[Step, AutoPromptState]]:
        """Replace the token at a random position, if another one is better."""
        x = state.prompt_ids
        position = int(torch.randint(slot.length, (1,), generator=slot.rng))
        own = torch.tensor([[position, int(x[position])]])  # not a swap
        swaps = Swaps(slot.tokens, self.topk, own)
        now = yield Pass(x[None], slot.examples, self.loss, swaps=swaps)
        assert now.swap_ids is not None  # (N, topk)
        swap_ids = now.swap_ids[position]
        ids = swapped_at(x, position, swap_ids[swap_ids != NO_SWAP])
        if slot.tokens.must_round_trip:
            ids = slot.tokens.surviving(ids)
        step = Step(now.losses[0], now.output_ids[0])
        if len(ids) == 0:
            return step, state
        tried = yield Pass(ids, slot.examples, self.loss, like_ids=x)
        best = int(tried.losses.argmin())
        losses = torch.stack([now.losses[0], tried.losses[best]])
        output_ids = tried.output_ids[best]
        if slot.must_confirm:
            both = torch.stack([x, ids[best]])
            asked = Pass(both, slot.examples, self.loss, like_ids=x, is_measured=True)
            measured = yield asked
            losses, output_ids = measured.losses, measured.output_ids[1]
        if losses[1] >= losses[0]:
            return step, state
        found_ids = ids[best] if slot.is_wanted(output_ids) else None
        return Step(step.loss, step.output_ids, found_ids=found_ids), AutoPromptState(ids[best])

    def prompt_ids(self, slot: Slot, state: AutoPromptState) -> Tensor:
        """X itself."""
        return state.prompt_ids


def swapped_at(ids: Tensor, position: int, tokens: Tensor) -> Tensor:
    """Copies of a prompt, (N,), with other tokens, (C,), at one position: (C, N).

    >>> swapped_at(torch.tensor([1, 2, 3]), 1, torch.tensor([8, 9]))
    tensor([[1, 8, 3],
            [1, 9, 3]])
    """
    copies = ids.repeat(len(tokens), 1)
    copies[:, position] = tokens
    return copies
