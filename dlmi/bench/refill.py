"""Targets per hour: slots that are refilled at once, against batches that wait for their slowest.

ADC solves short targets of the packaged LM within seconds, one token in some 6 steps and two in
some 25: three of the former to one of the latter are the mix. Both runs have the same slots, the
same steps per target and so the same results; only when a slot gets its next target differs. A
static batch keeps the rows of its finished targets, as a batch of fixed size does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlmi.data import TargetDataModule
from dlmi.lm import FrozenLM
from dlmi.methods import ADC
from dlmi.passes import StepLosses
from dlmi.quiet_run import run_quietly
from dlmi.slots import Slot
from dlmi.targets import Target, generate_targets

_SLOTS = 4
_TARGETS = 16
_LONG_EVERY = 4  # one target in four has two tokens


class StaticADC(ADC):
    """ADC in fixed batches: a batch of targets ends when its last one does.

    Attributes:
        rows_passed: Rows of all its steps.
    """

    rows_passed = 0

    def _refill(self, index: int) -> None:
        self.slots[index] = None
        if self.active:
            return
        for place in range(len(self.slots)):
            super()._refill(place)
        self._batch = self.active

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """Of the whole batch; what the finished rows give is thrown away."""
        self.rows_passed += len(self._batch)
        step = super().losses(self._batch)
        wanted = [self._batch.index(slot) for slot in slots]
        assert step.values is not None
        return StepLosses(step.losses[wanted], step.output_ids[wanted], step.values[wanted])


@dataclass(frozen=True)
class RefillTimes:
    """Both runs.

    Attributes:
        targets: How many.
        slots: Side by side.
        steps: Optimisation steps that each target took.
        refill_rows: Rows of all steps, with slots refilled at once.
        static_rows: The same in fixed batches.
        refill_seconds: All targets, with slots refilled at once.
        static_seconds: All targets, in fixed batches.
    """

    targets: int
    slots: int
    steps: tuple[int, ...]
    refill_rows: int
    static_rows: int
    refill_seconds: float
    static_seconds: float

    def ratios(self) -> dict[str, float]:
        """What they come to."""
        return {
            "targets per hour": 3600 * self.targets / self.refill_seconds,
            "refill / static": self.static_seconds / self.refill_seconds,
        }


def unequal_targets(lm: FrozenLM, count: int = _TARGETS) -> list[Target]:
    """Short targets with a long one among every few."""
    long = generate_targets(lm, (1,), count, 2, 1.0, 42)
    return [
        target
        if index % _LONG_EVERY == 0
        else replace(target, ids=target.ids[:1], text=lm.decode(target.ids[:1]))
        for index, target in enumerate(long)
    ]


def time_refill(lm: FrozenLM, steps: int = 80) -> RefillTimes:
    """Invert the same targets both ways.

    Args:
        lm: The model.
        steps: Budget of a target.
    """
    targets = unequal_targets(lm)
    refilled = ADC(prompt_length=10, steps=steps, restarts=1)
    static = StaticADC(prompt_length=10, steps=steps, restarts=1)
    seconds = []
    for module in (refilled, static):
        data = TargetDataModule.of(lm, targets, batch_size=_SLOTS, compile=False)
        start = time.perf_counter()
        run_quietly(module, data)
        seconds.append(time.perf_counter() - start)
    taken = {row.target_id: row.steps for row in refilled.finished}
    return RefillTimes(
        len(targets),
        _SLOTS,
        tuple(taken[target.id] for target in targets),
        sum(taken.values()),
        static.rows_passed,
        *seconds,
    )
