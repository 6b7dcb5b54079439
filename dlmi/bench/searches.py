"""The time per token-pass of a search, with one slot and with several.

Slots share the LM's passes, so a token-pass takes less time with more slots, until the machine is
busy.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlmi.bench.timing import StepClock
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods import SwapSearch
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.quiet import run_quietly
from dlmi.targets.target import Target

SEARCHES = ((20, 20, 1), (20, 20, 8))  # N, M, slots
_WARM_UP = 2


@dataclass(frozen=True)
class SearchTimes:
    """One line of the table; seconds and token-passes are medians of a step of all slots."""

    prompt_length: int
    target_length: int
    slots: int
    repeats: int
    seconds: float
    token_passes: float
    microseconds_per_token_pass: float  # over all timed steps


def time_search(
    lm: FrozenLM, targets_ids: Sequence[Sequence[int]], length: int, repeats: int
) -> SearchTimes:
    """Time some steps of a search for prompts of N tokens, with a target in each slot."""
    slots, steps = len(targets_ids), _WARM_UP + repeats
    targets = [Target.single(f"bench {i}", tuple(ids), "") for i, ids in enumerate(targets_ids)]
    clock = StepClock(lm.device, _WARM_UP)
    search = Inverter(SwapSearch(), length, steps=steps, eval_every=steps)
    run_quietly(search, TargetDataModule.of(lm, targets, batch_size=slots), [clock])
    return SearchTimes(
        length,
        len(targets[0].ids),
        slots,
        repeats,
        statistics.median(clock.seconds),
        statistics.median(clock.token_passes),
        1e6 * sum(clock.seconds) / sum(clock.token_passes),
    )
