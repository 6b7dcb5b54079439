"""RandomSearch: random prompts, of which the best is kept. What any method must beat at equal cost.

Every step decodes some prompts of tokens drawn uniformly from all that are allowed. The best is the
one whose output has the longest common subsequence with the target; among equals, the one with the
lower cross-entropy of the target along that output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.methods.base import Search, Step
from dlmi.methods.candidates import PromptState
from dlmi.methods.slot import Slot
from dlmi.scoring.evaluation import mean_lcs
from dlmi.scoring.passes import Pass, Steps


@dataclass
class RandomSearchState(PromptState):
    """The best prompt so far."""

    lcs: float = -1.0  # of its greedy output; below 0 before it is decoded
    loss: float = float("inf")  # cross-entropy of the target along that output

    @property
    def score(self) -> tuple[float, float]:
        """The higher, the better."""
        return self.lcs, -self.loss


@dataclass(frozen=True)
class RandomSearch(Search[RandomSearchState]):
    """Random prompts, of which the best is kept.

    Args:
        width: Prompts that a step decodes.
    """

    width: int = 8

    state_type = RandomSearchState

    def step(self, slot: Slot, state: RandomSearchState) -> Steps[tuple[Step, RandomSearchState]]:
        """Decode some prompts."""
        ids = slot.tokens.repaired(slot.tokens.random_ids(self.width, slot.length, slot.rng))
        if state.lcs < 0 or slot.target.is_shared:  # where steps see different examples
            ids = torch.cat([state.prompt_ids[None], ids])
            state = RandomSearchState(state.prompt_ids)
        best, output_ids = yield from self._best(slot, ids)
        if best.score > state.score and slot.must_confirm:
            best, output_ids = yield from self._best(slot, best.prompt_ids[None], is_measured=True)
        if not best.score > state.score:
            return Step(torch.tensor(state.loss), output_ids), state
        found_ids = best.prompt_ids if slot.is_wanted(output_ids) else None
        return Step(torch.tensor(best.loss), output_ids, found_ids=found_ids), best

    def _best(
        self, slot: Slot, ids: Tensor, is_measured: bool = False
    ) -> Steps[tuple[RandomSearchState, Tensor]]:
        """Decode prompts, (C, N); gives the best and its output, (M,)."""
        scores = yield Pass(ids, slot.examples, teacher_forcing=False, is_measured=is_measured)
        decoded = []
        for i, output_ids in enumerate(scores.output_ids):
            lcs = mean_lcs(slot.examples, output_ids.tolist())
            decoded.append((RandomSearchState(ids[i], lcs, float(scores.losses[i])), output_ids))
        return max(decoded, key=lambda pair: pair[0].score)
