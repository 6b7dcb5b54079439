"""The slots of one worker: opened for targets, stepped and measured together, and charged."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.errors import InputError
from dlmi.lm.transfer import HOST, moved
from dlmi.methods.base import Method
from dlmi.methods.slot import Slot
from dlmi.run.budget import Budget, most_reasoned
from dlmi.run.resume import Resume
from dlmi.run.scalars import is_log_step, publish
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import Evaluation, evaluate, mean_lcs, tokens_evaluated
from dlmi.scoring.passes import Cost, advance
from dlmi.scoring.reasoning import tokens_to_write, write_reasoning
from dlmi.targets.seeds import hash_seed
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary


class SlotPool(LightningModule):
    """The slots of one worker: their tensors are its parameters, a step is one step of each."""

    vocabulary: Vocabulary  # tokens that prompts may hold, by column of Z
    engine: Engine  # sends prompts through the LM
    budget: Budget  # of each target

    def __init__(
        self, method: Method[Any], prompt_length: int, fluency: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__()
        self.method = method
        self.prompt_length = prompt_length
        self.fluency = fluency
        self.seed = seed
        self.slots: list[Slot | None] = []  # None where there is no target
        self.prompts = nn.ModuleList()  # the parameters of each slot, by name
        self._clock = 0.0

    @property
    def active(self) -> list[Slot]:
        """The slots with a target."""
        return [slot for slot in self.slots if slot is not None]

    def configure_model(self) -> None:
        """Make one set of parameters per slot; `start` fills them when a target arrives."""
        if len(self.prompts) == len(self.slots):
            return
        # Z, softmax and loss are float32 whatever the LM is, and float64 if it is float64.
        dtype = torch.promote_types(self.vocabulary.lm.dtype, torch.float32)
        shapes = self.method.shapes(self.prompt_length, self.vocabulary)
        self.prompts = nn.ModuleList()
        for _ in self.slots:
            tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
            self.prompts.append(nn.ParameterDict(tensors))

    def configure_optimizers(self) -> Optimizer | None:
        """The method's optimizer; a search has none."""
        parameters = list(self.parameters())
        return self.method.optimizer(parameters) if parameters else None

    # ---- targets come and go

    def check_budget(self, targets: Iterable[Target]) -> None:
        """Raise `InputError` for a token budget below the start and last decodes of a target."""
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
        slot, first = self._open(target), None
        if not self.method.shapes(self.prompt_length, self.vocabulary):  # a search
            first = next(self.method.start(slot), None)
        start = self.engine.price(first, slot.account(math.inf)).total if first else 0
        return start + self.budget.reserve(slot)

    def _open(self, target: Target, index: int | None = None) -> Slot:
        """A slot for a target, not started yet; without an index it has no tensors."""
        key = hash_seed(f"{self.seed}/{target.id}")
        params = {} if index is None else dict(self.prompts[index].named_parameters())

        def reset_moments() -> None:
            for optimizer in self.trainer.optimizers:
                for parameter in params.values():
                    optimizer.state.pop(parameter, None)

        return Slot(
            target=target,
            examples=target.minibatch(0, key),
            tokens=self.vocabulary.for_target(target, key),
            params=params,
            length=self.prompt_length,
            rng=torch.Generator().manual_seed(key),
            can_narrow=not self.fluency,
            must_confirm=self.engine.has_copy,
            index=index or 0,
            key=key,
            reset_moments=reset_moments,
        )

    def refill(self, waiting: Iterator[Target], resume: Resume) -> None:
        """Give empty slots to the next targets; no slot is charged for the time."""
        new = []
        for index, occupant in enumerate(self.slots):
            if occupant is not None or (target := next(waiting, None)) is None:
                continue
            slot = self.slots[index] = self._open(target, index)
            slot.reset_moments()
            if target.id in resume:
                resume.restore(slot, self.method, self.trainer.optimizers)
            else:
                new.append(slot)
        accounts = [slot.account(self.budget.left(slot)) for slot in new]
        outcomes = advance([self.method.start(slot) for slot in new], self.engine, accounts)
        for slot, outcome, account in zip(new, outcomes, accounts, strict=True):
            slot.state, slot.cost = outcome.value, account.cost
        self.lap(is_charged=False)

    def lap(self, is_charged: bool = True) -> None:
        """Charge all slots for the time since the last lap, or none."""
        now = time.perf_counter()
        for slot in self.active if is_charged else ():
            slot.seconds += now - self._clock
        self._clock = now

    # ---- steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of every slot; those whose next pass the budget does not cover are spent.

        Losses are summed: a mean would couple the slots.
        """
        lm = self.engine.lm
        with torch.autocast(lm.device.type, enabled=False):  # reasoning is in the LM's own dtype
            slots = [slot for slot in self.active if self.prepare(slot)]
        accounts = [slot.account(self.budget.left(slot)) for slot in slots]
        with lm.precision.as_outside(lm.device.type):
            asked = [self.method.step(slot, slot.state) for slot in slots]
            outcomes = advance(asked, self.engine, accounts)
        total = torch.zeros((), device=self.device, requires_grad=True)  # of no slot in particular
        losses = []
        for slot, outcome, account in zip(slots, outcomes, accounts, strict=True):
            slot.cost += account.cost
            if outcome.value is None:
                slot.is_spent = True
                continue
            step, slot.state = outcome.value
            loss = step.loss if step.value is None else step.value
            slot.take(loss, step.output_ids)
            slot.found_ids = step.found_ids
            losses.append(loss.detach().to(total.dtype))
            if step.loss.requires_grad:
                total = total + step.loss.to(total)
        if losses:
            here = [loss for loss in losses if loss.device == HOST]
            there = [loss for loss in losses if loss.device != HOST]
            sums = [torch.stack(own).sum() for own in (here, there) if own]
            mean = sum(sums[1:], sums[0]) / len(losses)
            publish(self, {"train/loss": mean}, is_log_step(self.trainer))
        return total

    def prepare(self, slot: Slot) -> bool:
        """Set what the next step reads; False if the budget does not cover the LM's reasoning.

        Reasoning after the same prompt is kept from earlier steps. It is written for each slot
        alone, so that a slot does not depend on its batch mates.
        """
        slot.progress = self.budget.share_used(slot)
        slot.examples = slot.target.minibatch(slot.step, slot.key)
        if not slot.target.reasons:
            return True
        prompt_ids = tuple(self.method.prompt_ids(slot, slot.state).tolist())
        if slot.reasoned_ids != prompt_ids:
            slot.reasoned_ids, slot.reasoning = prompt_ids, {}
        wanted = [e for e in slot.examples if e.context.reasoning and e.id not in slot.reasoning]
        if most_reasoned(slot, wanted) > self.budget.left(slot):
            slot.is_spent = True
            return False
        written = write_reasoning(self.engine.lm, [prompt_ids] * len(wanted), wanted)
        for example, ids in zip(wanted, written, strict=True):
            slot.reasoning[example.id] = ids
            slot.cost += Cost(tokens_to_write(example, ids, slot.length))
        slot.examples = tuple(e.after(slot.reasoning.get(e.id, ())) for e in slot.examples)
        return True

    @torch.no_grad()
    def on_after_backward(self) -> None:
        """Note whose loss or gradient is not finite, and zero its gradients; the others go on.

        Rows of the LM's batch are independent, so NaN in one slot spoils no other. A loss scaler,
        though, looks at all gradients together, which is why those of a failed slot become zero.
        """
        found: list[tuple[Slot, str, Tensor]] = []
        for slot in (slot for slot in self.active if slot.loss is not None):
            tensors = {"loss": slot.loss, **{name: p.grad for name, p in slot.params.items()}}
            found += [(slot, n, t.sum()) for n, t in tensors.items() if t is not None]
        sums = moved([value for _, _, value in found], HOST)  # one wait for the device
        for (slot, name, _), value in zip(found, sums, strict=True):
            if name == "loss":
                slot.loss = value
            if slot.failure is None and not math.isfinite(number := float(value)):
                what = f"the loss is {number}" if name == "loss" else f"{name} has no gradient"
                slot.failure = f"{what} at step {slot.step}"
        for slot, name, _ in found:
            if slot.failure is not None and name != "loss":
                cast(Tensor, slot.params[name].grad).zero_()

    # ---- measurements

    def evaluate(self, slots: Sequence[Slot]) -> None:
        """Decode the discrete prompts of slots; a prompt that did not change is not decoded."""
        for slot in slots:
            slot.progress = self.budget.share_used(slot)
            slot.diagnostics = self.method.diagnostics(slot, slot.state)
            if slot.found_ids is None:  # what the last step has found to be exact
                slot.found_ids = self.method.prompt_ids(slot, slot.state)
        _bring_to_host(slots)
        new: dict[int, Tensor] = {}
        for i, slot in enumerate(slots):
            ids = cast(Tensor, slot.found_ids)
            if slot.last is None or slot.last.prompt_ids != tuple(ids.tolist()):
                new[i] = ids
        decoded = dict(zip(new, self._decode([slots[i] for i in new], new.values()), strict=True))
        for i, slot in enumerate(slots):
            evaluation = decoded.get(i, slot.last)
            assert evaluation is not None
            evaluation = replace(evaluation, step=slot.step)
            if slot.loss is not None and slot.output_ids is not None:
                lcs = mean_lcs(slot.trained_on, slot.output_ids.tolist())
                evaluation = replace(evaluation, loss=float(slot.loss), as_in_code_lcs=lcs)
            slot.record(evaluation)

    def try_last(self, slot: Slot) -> None:
        """Record the best of the further prompts that a method tries at the end."""
        prompt_ids, before = self.method.last_prompts(slot, slot.state), slot.last
        made = self._decode([slot] * len(prompt_ids), prompt_ids)
        best = max(made, key=lambda evaluation: evaluation.score)
        assert before is not None
        slot.record(replace(best, loss=before.loss, as_in_code_lcs=before.as_in_code_lcs))

    def _decode(self, slots: Sequence[Slot], prompts: Iterable[Tensor]) -> list[Evaluation]:
        if not slots:
            return []
        engine = self.engine
        rows = torch.stack(list(prompts)).to(HOST)
        targets, steps = [slot.target for slot in slots], [slot.step for slot in slots]
        evaluations = []
        made = evaluate(engine.lm, rows, targets, steps, engine.prefixes)
        for slot, evaluation in zip(slots, made, strict=True):
            once = engine.price_of_prefixes(slot.target.measured, slot.account(math.inf))
            read = tokens_evaluated(evaluation, slot.target, engine.lm.can_share)
            slot.cost += Cost(once + read)
            if slot.tokens.must_round_trip:
                is_eligible = slot.tokens.round_trips(evaluation.prompt_ids)
                evaluation = replace(evaluation, is_eligible=is_eligible)
            evaluations.append(evaluation)
        return evaluations


def _bring_to_host(slots: Sequence[Slot]) -> None:
    """Move what an evaluation looks at to the CPU, in one copy for all slots."""
    held: list[dict[str, Tensor]] = []
    for slot in slots:
        rest = {"found_ids": slot.found_ids, "output_ids": slot.output_ids, "loss": slot.loss}
        held.append(slot.diagnostics | {n: t for n, t in rest.items() if t is not None})
    arrived = iter(moved([tensor for own in held for tensor in own.values()], HOST))
    for slot, own in zip(slots, held, strict=True):
        for name in own:
            if name in slot.diagnostics:
                slot.diagnostics[name] = next(arrived)
            else:
                setattr(slot, name, next(arrived))
