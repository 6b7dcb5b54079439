r"""GCG: greedy coordinate gradient, a discrete search that the gradient guides.

.. math::
    C_i = top_k( -\nabla_{e_{x_i}} d(f(x), y) ), \quad
    x \leftarrow \arg\min_{x' \in B} d(f(x'), y)

Zou et al. 2023, with the defaults of nanoGCG, but for `buffer_size`. B holds `search_width` copies
of x, each with `n_replace` random positions changed to a random member of that position's top k.
Every step costs `search_width` forward passes, so compare it by token passes, not by steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.methods.base import Defaults, Search, Step
from dlmi.methods.candidates import PromptState, keep_best
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps, Swaps
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary


@dataclass
class GCGState(PromptState):
    """What is kept between steps."""

    carried: Tensor | None = None  # gradients of the steps so far, where they have momentum, (N, d)


@dataclass(frozen=True)
class GCG(Search[GCGState]):
    """Greedy coordinate gradient.

    Args:
        search_width: Candidates per step.
        topk: Candidate tokens per position.
        n_replace: Positions changed in each candidate.
        buffer_size: 0: take the best candidate even if it is worse; 1: keep the current prompt
            unless a candidate is better; more: the same, from the best of that many random starts.
        first_prompt: The token "x" over and over (`x`, if it may be used), or `random` tokens.
        filter_ids: Drop candidates whose text does not encode to the same tokens again.
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
    """

    search_width: int = 512
    topk: int = 256
    n_replace: int = 1
    buffer_size: int = 1
    first_prompt: Literal["x", "random"] = "x"
    filter_ids: bool = True
    loss: LossName = "cross_entropy"

    momentum = 0.0  # weight of the gradients of earlier steps: none (MAC has some)
    state_type = GCGState
    published = Defaults(250, eval_every=None, token_sets=("no_special", "ascii", "printable"))
    ranges: ClassVar = {"buffer_size": "[0, inf)"}

    def check(self, vocabulary: Vocabulary, length: int, targets: Sequence[Target]) -> None:
        """There must be `topk` tokens to choose from, for each target."""
        allowed = len(vocabulary) - max(len(vocabulary.barred_columns(t)) for t in targets)
        if self.topk > allowed:
            raise InputError(
                f"Expected `model.method.topk` to be at most {allowed} (the tokens of "
                f"{vocabulary.lm.name} that may be used), but got {self.topk}."
            )
        if self.n_replace > length:
            raise InputError(
                "Expected `model.method.n_replace` to be at most `model.prompt_length` "
                f"({length}), but got {self.n_replace}."
            )

    def starts(self, slot: Slot) -> Tensor:
        """The prompt of x's, then random ones."""
        ids = slot.tokens.random_ids(max(self.buffer_size, 1), slot.length, slot.rng)
        x_id = slot.tokens.lm.encode(" x")[-1]
        if self.first_prompt == "x" and slot.tokens.allows(x_id):
            ids[0] = x_id
        return ids

    def step(self, slot: Slot, state: GCGState) -> Steps[tuple[Step, GCGState]]:
        """The gradient at x proposes swaps; the best of them is the next x."""
        x = state.prompt_ids
        swaps = Swaps(slot.tokens, self.topk, momentum=self.momentum, carried=state.carried)
        now = yield Pass(x[None], slot.examples, self.loss, swaps=swaps)
        assert now.swap_ids is not None  # (N, topk)
        candidates = self.candidates(slot, x, now.swap_ids)
        may_worsen = self.buffer_size == 0
        step, x = yield from keep_best(slot, self.loss, x, now, candidates, may_worsen)
        return step, GCGState(x, now.carried)

    def candidates(self, slot: Slot, x: Tensor, likely_ids: Tensor) -> Tensor:
        """Copies of x, (N,) to (C, N), each with `n_replace` positions changed.

        Such a position gets a random one of the tokens that are proposed for it, (N, topk). Those
        that round-trip are kept; all, if none does and none must.
        """
        positions = self.positions(slot)
        picks = torch.randint(likely_ids.shape[1], positions.shape, generator=slot.rng)
        ids = x.repeat(len(positions), 1).scatter_(1, positions, likely_ids[positions, picks])
        kept = slot.tokens.surviving(ids) if self.filter_ids else slot.surviving(ids)
        return kept if len(kept) or slot.tokens.must_round_trip else ids

    def positions(self, slot: Slot) -> Tensor:
        """The positions that each candidate changes, (C, n_replace), distinct in each row."""
        order = torch.rand(self.search_width, slot.length, generator=slot.rng).argsort(-1)
        return order[:, : self.n_replace]
