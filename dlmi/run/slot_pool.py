"""The slots of a run: opened for targets, filled by the method, put back to work after a stop."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dlmi.methods.base import Method, Step
from dlmi.methods.slot import Slot
from dlmi.run.budget import Budget
from dlmi.run.preparation import prepare_step
from dlmi.run.queue import TargetQueue
from dlmi.run.resume import Resume
from dlmi.scoring.engine import Engine
from dlmi.scoring.passes import advance
from dlmi.targets.seeds import hash_seed
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary


def make_prompts(
    shapes: Mapping[str, tuple[int, ...]], count: int, dtype: torch.dtype
) -> nn.ModuleList:
    """The parameters of slots, {Z, Phi} each, all zero."""

    def one() -> nn.ParameterDict:
        tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        return nn.ParameterDict({name: nn.Parameter(t) for name, t in tensors.items()})

    return nn.ModuleList(one() for _ in range(count))


@dataclass
class SlotPool:
    """Opens and refills the slots of one worker.

    Attributes:
        method: Fills their tensors.
        engine: Reads the starts of searches.
        vocabulary: What prompts may hold.
        budget: Of each target.
        seed: Of the run.
        can_narrow: Whether a search may read the end of a prompt alone.
        params_of: The parameters of a slot, by its index.
        optimizers: Those of the trainer.
        slots: The targets in flight; None where there is none.
    """

    method: Method[Any]
    engine: Engine
    vocabulary: Vocabulary
    budget: Budget
    seed: int
    can_narrow: bool
    params_of: Callable[[int], dict[str, nn.Parameter]]
    optimizers: Callable[[], Sequence[Optimizer]]
    slots: list[Slot | None] = field(default_factory=list)
    _clock: float = 0.0

    @property
    def active(self) -> list[Slot]:
        """The slots in flight."""
        return [slot for slot in self.slots if slot is not None]

    def check_budget(self, targets: Iterable[Target]) -> None:
        """Raise `InputError` for a token budget below the start and the decodes of a target."""
        if self.budget.token_passes is not None:
            self.budget.check(self._least_cost(target) for target in targets)

    def _least_cost(self, target: Target) -> tuple[str, int]:
        """A target's id, and what its start and the decodes at its end cost."""
        slot, cost = self._open(None, target), 0
        if not self.method.shapes(slot.length, self.vocabulary):  # a search
            for first in self.method.start(slot):
                cost = self.engine.price(first, slot.account(float("inf"))).total
                break
        return target.id, cost + self.budget.reserve(slot)

    def _open(self, index: int | None, target: Target) -> Slot:
        """A slot for a target, with nothing in it yet; without an index it has no tensors."""
        key = hash_seed(f"{self.seed}/{target.id}")
        params = {} if index is None else self.params_of(index)

        def reset_moments() -> None:
            for optimizer in self.optimizers():
                for parameter in params.values():
                    optimizer.state.pop(parameter, None)

        return Slot(
            target=target,
            examples=target.minibatch(0, key),
            tokens=self.vocabulary.for_target(target, key),
            params=params,
            length=self.budget.prompt_length,
            rng=torch.Generator(device=self.engine.lm.device).manual_seed(key),
            can_narrow=self.can_narrow,
            index=-1 if index is None else index,
            key=key,
            reset_moments=reset_moments,
        )

    def refill(self, indices: Iterable[int], queue: TargetQueue, resume: Resume) -> None:
        """Give slots to the next targets, or leave them empty; nobody is charged for the time."""
        new = []
        for index in indices:
            self.slots[index] = None
            target = queue.take()
            if target is None:
                continue
            slot = self.slots[index] = self._open(index, target)
            slot.forget_moments()
            if target.id in resume:
                resume.restore(slot, self.method, self.optimizers())
            else:
                new.append(slot)
        accounts = [slot.account(self.budget.left(slot)) for slot in new]
        starts = [self.method.start(slot) for slot in new]
        for slot, outcome, account in zip(
            new, advance(starts, self.engine, accounts), accounts, strict=True
        ):
            slot.state, slot.cost = outcome.value, account.cost
        self.restart_clock()

    def step(self) -> list[Step]:
        """One step of every slot in flight; those whose next pass does not fit are spent."""
        method, budget, lm = self.method, self.budget, self.engine.lm
        with torch.autocast(lm.device.type, enabled=False):  # reasoning is in the LM's own dtype
            slots = [s for s in self.active if prepare_step(s, method, lm, budget)]
        accounts = [slot.account(budget.left(slot)) for slot in slots]
        steps = []
        with lm.mixed_precision():
            outcomes = advance([method.step(s, s.state) for s in slots], self.engine, accounts)
        for slot, outcome, account in zip(slots, outcomes, accounts, strict=True):
            slot.cost += account.cost
            if outcome.value is None:
                slot.is_spent = True
                continue
            step, slot.state = outcome.value
            slot.take(step.loss if step.value is None else step.value, step.output_ids)
            slot.found_ids = step.found_ids
            steps.append(step)
        return steps

    def leave_group(self, solved: Slot) -> list[Slot]:
        """Let the other tries at a task leave without a row, once one has solved it."""
        group = solved.target.group
        others = [s for s in self.active if s.target.group == group and s is not solved]
        for slot in others:
            self.slots[slot.index] = None
        return others

    def charge_time(self) -> None:
        """Add the time since the last call, or since the clock was restarted, to all slots."""
        now = time.perf_counter()
        for slot in self.active:
            slot.seconds += now - self._clock
        self._clock = now

    def restart_clock(self) -> None:
        """What came before this moment is charged to nobody."""
        self._clock = time.perf_counter()
