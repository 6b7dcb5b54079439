"""RandomSearch: random prompts, of which the best is kept. What any method must beat at equal cost.

No gradient and no memory: every step decodes some prompts of tokens drawn alike from all that are
allowed. The best is the one whose output has the longest common subsequence with the target; among
equals, the one after which the target is likelier along that output (cross-entropy of the decode).

With a shared prompt, steps see different examples: then the best is read again beside the new ones.
"""

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.errors import check_at_least_one
from dlmi.methods.base import Defaults, Search, Step
from dlmi.methods.slot import Slot
from dlmi.metrics import lcs_ratio
from dlmi.scoring.passes import Pass, Scores, Steps


@dataclass
class RandomSearchState:
    """The best prompt so far."""

    prompt_ids: Tensor  # (N,)
    lcs: float = -1.0  # of what it makes the LM say; below 0 before it is decoded
    loss: float = float("inf")  # cross-entropy of the target along that output


@dataclass(frozen=True)
class RandomSearch(Search[RandomSearchState]):
    """Random prompts, of which the best is kept.

    Args:
        width: Prompts that a step decodes.
    """

    width: int = 8

    state_type = RandomSearchState

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_at_least_one("model.method", width=self.width)

    def defaults(self) -> Defaults:
        """The sets of tokens of the search that it is the floor of."""
        return Defaults(steps=500, eval_every=None, token_sets=("no_special",))

    def starts(self, slot: Slot) -> Tensor:
        """One of many."""
        return slot.tokens.random_ids(1, slot.length, slot.rng)

    def begin(self, slot: Slot, prompt_ids: Tensor) -> RandomSearchState:
        """At a prompt that has yet to be decoded."""
        return RandomSearchState(prompt_ids)

    def step(self, slot: Slot, state: RandomSearchState) -> Steps[tuple[Step, RandomSearchState]]:
        """Decode some prompts."""
        ids = slot.tokens.repaired(slot.tokens.random_ids(self.width, slot.length, slot.rng))
        must_read_again = state.lcs < 0 or slot.target.is_shared
        if must_read_again:
            ids = torch.cat([state.prompt_ids[None], ids])
            state = RandomSearchState(state.prompt_ids)
        scores = yield Pass(ids, slot.examples, teacher_forcing=False)
        found = [
            RandomSearchState(own_ids, self._lcs(slot, output_ids), float(loss))
            for own_ids, output_ids, loss in zip(ids, scores.output_ids, scores.losses, strict=True)
        ]
        best = max(range(len(found)), key=lambda i: (found[i].lcs, -found[i].loss))
        candidate, output_ids = found[best], scores.output_ids[best]
        if not _is_better(candidate, state):
            return self._report(state, output_ids, None), state
        if slot.must_confirm:
            asked = Pass(ids[best][None], slot.examples, teacher_forcing=False, is_measured=True)
            measured: Scores = yield asked
            output_ids = measured.output_ids[0]
            lcs, loss = self._lcs(slot, output_ids), float(measured.losses[0])
            candidate = RandomSearchState(ids[best], lcs, loss)
            if not _is_better(candidate, state):
                return self._report(state, output_ids, None), state
        is_exact = slot.is_wanted(output_ids)
        found_ids = candidate.prompt_ids if is_exact else None
        return self._report(candidate, output_ids, found_ids), candidate

    def _report(
        self, state: RandomSearchState, output_ids: Tensor, found_ids: Tensor | None
    ) -> Step:
        return Step(torch.tensor(state.loss), output_ids, found_ids=found_ids)

    def _lcs(self, slot: Slot, output_ids: Tensor) -> float:
        """LCS of what was said, (M,), with the target; the mean over examples."""
        lengths = [len(example.ids) for example in slot.examples]
        said = torch.split(output_ids, lengths)
        pairs = zip(slot.examples, said, strict=True)
        return statistics.fmean(lcs_ratio(example.ids, own.tolist()) for example, own in pairs)

    def prompt_ids(self, slot: Slot, state: RandomSearchState) -> Tensor:
        """The best so far."""
        return state.prompt_ids


def _is_better(one: RandomSearchState, other: RandomSearchState) -> bool:
    return (one.lcs, -one.loss) > (other.lcs, -other.loss)
