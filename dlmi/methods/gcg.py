r"""GCG: greedy coordinate gradient, a discrete search that the gradient only guides.

.. math::
    C_i = top_k( -\nabla_{e_{x_i}} d(f(x), y) ), \quad
    x \leftarrow \arg\min_{x' \in B} d(f(x'), y)

Zou et al. 2023, with the defaults of nanoGCG. B holds `search_width` copies of x, each with
`n_replace` random positions changed to a random member of that position's top k. Every step costs
`search_width` forward passes, so compare it by token passes, not by steps. There is no relaxation:
the prompt that is measured is the one that was optimised.

`buffer_size` says what a step may lose: 0 takes the best candidate even if it is worse (the
original rule), 1 keeps x unless a candidate is better, more starts from that many prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dlmi.errors import InputError, check_at_least_one, check_between
from dlmi.methods.base import Defaults, Search, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps, Swaps
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary


@dataclass
class GCGState:
    """What is kept between steps."""

    prompt_ids: Tensor  # x, (N,)
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
        loss: `cross_entropy`, `margin` (0 where the target is the argmax), `hinge` or `mellowmax`
            (log mean exp of the tokens' cross-entropies: the worst token counts most).
    """

    search_width: int = 512
    topk: int = 256
    n_replace: int = 1
    buffer_size: int = 1
    first_prompt: Literal["x", "random"] = "x"
    filter_ids: bool = True
    loss: LossName = "cross_entropy"

    state_type = GCGState

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_at_least_one("model.method", search_width=self.search_width)
        check_at_least_one("model.method", topk=self.topk, n_replace=self.n_replace)
        check_between("model.method", 0, math.inf, buffer_size=self.buffer_size)

    def defaults(self) -> Defaults:
        """NanoGCG's."""
        sets = ("no_special", "ascii", "printable")
        return Defaults(steps=250, eval_every=None, token_sets=sets)

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
        """x's, then random prompts."""
        ids = slot.tokens.random_ids(max(self.buffer_size, 1), slot.length, slot.rng)
        x_id = slot.tokens.lm.encode(" x")[-1]
        if self.first_prompt == "x" and slot.tokens.allows(x_id):
            ids[0] = x_id
        return ids

    def begin(self, slot: Slot, prompt_ids: Tensor) -> GCGState:
        """From x."""
        return GCGState(prompt_ids)

    def step(self, slot: Slot, state: GCGState) -> Steps[tuple[Step, GCGState]]:
        """The gradient at x proposes swaps; the best of them is the next x."""
        x = state.prompt_ids
        now = yield Pass(x[None], slot.examples, self.loss, swaps=self._swaps(slot, state))
        assert now.swap_ids is not None  # (N, topk)
        kept = GCGState(x, now.carried)
        ids = self._surviving(
            slot, swapped(x, now.swap_ids, self.search_width, self.n_replace, slot.rng)
        )
        step = Step(now.losses[0], now.output_ids[0])
        if len(ids) == 0:
            return step, kept
        tried = yield Pass(ids, slot.examples, self.loss, like_ids=x)
        best = ids[int(tried.losses.argmin())]
        loss, output_ids, rival = tried.losses.min(), tried.output_ids[tried.losses.argmin()], now
        if slot.must_confirm:
            both = torch.stack([x, best])
            rival = yield Pass(both, slot.examples, self.loss, like_ids=x, is_measured=True)
            loss, output_ids = rival.losses[1], rival.output_ids[1]
        if self.buffer_size > 0 and loss >= rival.losses[0]:
            return step, kept
        found_ids = best if slot.is_wanted(output_ids) else None
        return Step(step.loss, step.output_ids, found_ids=found_ids), GCGState(best, now.carried)

    def _swaps(self, slot: Slot, state: GCGState) -> Swaps:
        """What is asked of the gradient at x."""
        return Swaps(slot.tokens, self.topk)

    def _surviving(self, slot: Slot, ids: Tensor) -> Tensor:
        """The candidates that round-trip; if none does, and none must, all."""
        if not (self.filter_ids or slot.tokens.must_round_trip):
            return ids
        kept = slot.tokens.surviving(ids)
        return kept if len(kept) or slot.tokens.must_round_trip else ids

    def prompt_ids(self, slot: Slot, state: GCGState) -> Tensor:
        """X itself."""
        return state.prompt_ids


def swapped(
    ids: Tensor, likely_ids: Tensor, width: int, n_replace: int, rng: torch.Generator
) -> Tensor:
    """Copies of a prompt with random positions set to random tokens that the gradient likes.

    Args:
        ids: The prompt, (N,).
        likely_ids: Tokens that each position may get, (N, topk).
        width: How many copies, C.
        n_replace: Positions changed in each.
        rng: Source of the draws.

    Returns:
        (C, N).
    """
    order = torch.rand(width, len(ids), generator=rng).argsort(-1)
    positions = order[:, :n_replace]  # (C, n_replace), distinct in each row
    picks = torch.randint(likely_ids.shape[1], positions.shape, generator=rng)
    return ids.repeat(width, 1).scatter_(1, positions, likely_ids[positions, picks])
