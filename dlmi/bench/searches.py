"""What a token-pass of a search costs, alone and beside others.

The searches of several slots share the LM's passes, so that a token-pass should take less time the
more slots there are, until the machine has enough to do.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer

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
    """One line of the table.

    Attributes:
        prompt_length: N.
        target_length: M.
        slots: Targets side by side.
        repeats: Steps that were timed.
        seconds: Median of a step of all slots.
        token_passes: Median of a step of all slots.
        microseconds_per_token_pass: Over all timed steps.
    """

    prompt_length: int
    target_length: int
    slots: int
    repeats: int
    seconds: float
    token_passes: float
    microseconds_per_token_pass: float


class CostMeter(Callback):
    """Token-passes of each step of a run, over all slots."""

    def __init__(self) -> None:
        self.token_passes: list[int] = []
        self._before = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """A step begins."""
        self._before = _spent(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """A step is over."""
        self.token_passes.append(_spent(pl_module) - self._before)


def _spent(module: Inverter) -> int:
    return sum(slot.cost.total for slot in module.active)


def time_search(
    lm: FrozenLM, targets_ids: Sequence[Sequence[int]], length: int, repeats: int
) -> SearchTimes:
    """Time the steps of a search.

    Args:
        lm: The model.
        targets_ids: What is searched for, a target in each slot.
        length: N.
        repeats: Timed steps.
    """
    slots = len(targets_ids)
    targets = [Target.single(f"bench {i}", tuple(ids), "") for i, ids in enumerate(targets_ids)]
    clock, meter = StepClock(lm.device, warm_up=_WARM_UP), CostMeter()
    steps = _WARM_UP + repeats
    search = Inverter(SwapSearch(), length, steps=steps, eval_every=steps)
    run_quietly(search, TargetDataModule.of(lm, targets, batch_size=slots), [clock, meter])
    passes = meter.token_passes[_WARM_UP:]
    return SearchTimes(
        length,
        len(targets[0].ids),
        slots,
        repeats,
        statistics.median(clock.seconds),
        statistics.median(passes),
        1e6 * sum(clock.seconds) / sum(passes),
    )
