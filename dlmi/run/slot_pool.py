"""The slots of one worker: opened for targets, stepped and measured together, charged for it."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.errors import InputError
from dlmi.methods.base import Method, Step
from dlmi.methods.slot import Slot
from dlmi.run.budget import Budget
from dlmi.run.resume import Resume
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import Evaluation, evaluate, mean_lcs, tokens_evaluated
from dlmi.scoring.passes import Cost, advance
from dlmi.scoring.reasoning import tokens_to_write, write_reasoning
from dlmi.targets.seeds import hash_seed
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary


@dataclass
class SlotPool:
    """All that happens to slots between two hooks of Lightning."""

    method: Method[Any]
    engine: Engine
    vocabulary: Vocabulary
    budget: Budget
    seed: int
    can_narrow: bool  # whether a search may read the end of a prompt alone
    params_of: Callable[[int], dict[str, nn.Parameter]]  # the parameters of a slot, by its index
    optimizers: Callable[[], Sequence[Optimizer]]  # those of the trainer
    # The targets in flight; None where there is none
    slots: list[Slot | None] = field(default_factory=list)
    _clock: float = 0.0

    @property
    def active(self) -> list[Slot]:
        """The slots in flight."""
        return [slot for slot in self.slots if slot is not None]

    # ---- targets come and go

    def check_budget(self, targets: Iterable[Target]) -> None:
        """Raise `InputError` for a token budget below the start and the decodes of a target."""
        given = self.budget.token_passes
        if given is None:
            return
        least, target_id = max((self._least_cost(target), target.id) for target in targets)
        if least > given:
            raise InputError(
                f"Expected `model.token_budget` to be at least {least}, which covers the start of "
                f"target {target_id} and the decodes of its prompts, but got {given}."
            )

    def _least_cost(self, target: Target) -> int:
        slot, cost = self._open(target), 0
        if not self.method.shapes(slot.length, self.vocabulary):  # a search
            for first in self.method.start(slot):
                cost = self.engine.price(first, slot.account(math.inf)).total
                break
        return cost + self.budget.reserve(slot)

    def _open(self, target: Target, index: int = -1) -> Slot:
        """A slot for a target, with nothing in it yet; without an index it has no tensors."""
        key = hash_seed(f"{self.seed}/{target.id}")
        params = {} if index < 0 else self.params_of(index)

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
            rng=torch.Generator().manual_seed(key),
            can_narrow=self.can_narrow,
            must_confirm=self.engine.has_copy,
            index=index,
            key=key,
            reset_moments=reset_moments,
        )

    def refill(self, waiting: Iterator[Target], resume: Resume) -> None:
        """Give empty slots to the next targets; nobody is charged for the time."""
        new = []
        for index, occupant in enumerate(self.slots):
            if occupant is not None or (target := next(waiting, None)) is None:
                continue
            slot = self.slots[index] = self._open(target, index)
            slot.reset_moments()
            if target.id in resume:
                resume.restore(slot, self.method, self.optimizers())
            else:
                new.append(slot)
        accounts = [slot.account(self.budget.left(slot)) for slot in new]
        outcomes = advance([self.method.start(slot) for slot in new], self.engine, accounts)
        for slot, outcome, account in zip(new, outcomes, accounts, strict=True):
            slot.state, slot.cost = outcome.value, account.cost
        self.lap(is_charged=False)

    # ---- steps

    def step(self) -> list[Step]:
        """One step of every slot in flight; those whose next pass does not fit are spent."""
        lm = self.engine.lm
        with torch.autocast(lm.device.type, enabled=False):  # reasoning is in the LM's own dtype
            slots = [slot for slot in self.active if self.prepare(slot)]
        accounts = [slot.account(self.budget.left(slot)) for slot in slots]
        steps = []
        with lm.precision.as_outside(lm.device.type):
            asked = [self.method.step(slot, slot.state) for slot in slots]
            outcomes = advance(asked, self.engine, accounts)
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

    def prepare(self, slot: Slot) -> bool:
        """Set what the next step reads; False where the budget does not cover the LM's reasoning.

        What the LM wrote after the same prompt in an earlier step is known. Each slot's is written
        by itself, so that no slot feels its batch mates.
        """
        slot.progress = self.budget.share_used(slot)
        slot.examples = slot.target.minibatch(slot.step, slot.key)
        if not slot.target.reasons:
            return True
        prompt_ids = tuple(self.method.prompt_ids(slot, slot.state).tolist())
        if slot.reasoned_ids != prompt_ids:
            slot.reasoned_ids, slot.reasoning = prompt_ids, {}
        wanted = [e for e in slot.examples if e.context.reasoning and e.id not in slot.reasoning]
        if self.budget.most_reasoned(wanted) > self.budget.left(slot):
            slot.is_spent = True
            return False
        written = write_reasoning(self.engine.lm, [prompt_ids] * len(wanted), wanted)
        for example, ids in zip(wanted, written, strict=True):
            slot.reasoning[example.id] = ids
            slot.cost += Cost(tokens_to_write(example, ids, slot.length))
        slot.examples = tuple(e.after(slot.reasoning.get(e.id, ())) for e in slot.examples)
        return True

    @torch.no_grad()
    def mark_failures(self) -> None:
        """After a backward pass: note whose loss or gradient is not finite, and drop the gradient.

        Slots meet nowhere in the LM, so a row that is NaN spoils no other row. A loss scaler,
        though, looks at all gradients at once: a failed slot's gradient is therefore set to zero.
        """
        slots = [slot for slot in self.active if slot.loss is not None]
        found = []
        for slot in slots:
            found.append((slot, "loss", cast(Tensor, slot.loss).float()))
            for name, parameter in slot.params.items():
                if parameter.grad is not None:
                    found.append((slot, name, parameter.grad.sum().float()))
        sums = [value.to(found[-1][2].device) for _, _, value in found]
        numbers = torch.stack(sums).tolist() if sums else []  # one wait for the device
        for (slot, name, _), number in zip(found, numbers, strict=True):
            if slot.failure is None and not math.isfinite(number):
                what = f"the loss is {number}" if name == "loss" else f"{name} has no gradient"
                slot.failure = f"{what} at step {slot.step}"
        for parameter in (p for slot in slots if slot.failure for p in slot.params.values()):
            if parameter.grad is not None:
                parameter.grad.zero_()

    # ---- measurements

    def evaluate(self, slots: Sequence[Slot]) -> None:
        """Decode the discrete prompts that slots stand for; one decoded just before is known."""
        prompts: list[Tensor] = []
        known: list[Evaluation | None] = []
        for slot in slots:
            slot.progress = self.budget.share_used(slot)
            slot.diagnostics = self.method.diagnostics(slot, slot.state)
            ids = slot.found_ids  # what the last step has found to be exact
            prompts.append(self.method.prompt_ids(slot, slot.state) if ids is None else ids)
            is_known = slot.last and slot.last.prompt_ids == tuple(prompts[-1].tolist())
            known.append(slot.last if is_known else None)
        new = [i for i, evaluation in enumerate(known) if evaluation is None]
        decoded = iter(self._decode([slots[i] for i in new], [prompts[i] for i in new]))
        for slot, evaluation in zip(slots, known, strict=True):
            evaluation = replace(evaluation or next(decoded), step=slot.step)
            if slot.loss is not None and slot.output_ids is not None:
                lcs = mean_lcs(slot.trained_on, slot.output_ids.tolist())
                evaluation = replace(evaluation, loss=float(slot.loss), as_in_code_lcs=lcs)
            slot.record(evaluation)

    def try_last(self, slot: Slot) -> None:
        """Record the best of the further prompts that a method tries at the end."""
        prompt_ids, before = self.method.last_prompts(slot, slot.state), slot.last
        made = self._decode([slot] * len(prompt_ids), list(prompt_ids))
        best = max(made, key=lambda evaluation: evaluation.score)
        assert before is not None
        slot.record(replace(best, loss=before.loss, as_in_code_lcs=before.as_in_code_lcs))

    def _decode(self, slots: Sequence[Slot], prompts: Sequence[Tensor]) -> list[Evaluation]:
        if not slots:
            return []
        engine = self.engine
        rows = torch.stack([prompt.to(engine.lm.device) for prompt in prompts])
        targets, steps = [slot.target for slot in slots], [slot.step for slot in slots]
        evaluations = []
        made = evaluate(engine.lm, rows, targets, steps, engine.prefixes)
        for slot, evaluation in zip(slots, made, strict=True):
            once = engine.price_of_prefixes(slot.target.measured, slot.account(math.inf))
            read = tokens_evaluated(evaluation, slot.target, self.budget.can_share)
            slot.cost += Cost(once + read)
            if slot.tokens.must_round_trip:
                is_eligible = slot.tokens.round_trips(evaluation.prompt_ids)
                evaluation = replace(evaluation, is_eligible=is_eligible)
            evaluations.append(evaluation)
        return evaluations

    def lap(self, is_charged: bool = True) -> None:
        """Charge all slots for the time since the last lap, or nobody."""
        now = time.perf_counter()
        for slot in self.active if is_charged else ():
            slot.seconds += now - self._clock
        self._clock = now
