"""What an inverter is: a LightningModule that optimises the prompts of a queue of targets.

It owns the slots' parameters and nothing else; the LM belongs to the data module. One
`Trainer.fit` inverts the whole queue: a training step is one optimisation step of every slot in
flight, and a slot whose target is solved, or whose budget is spent, reports its row and takes the
next target at once. Several ranks do so side by side and take from one queue.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlmi.callbacks.base import InversionCallback
from dlmi.checks import check_run
from dlmi.compiled import CompileDecision
from dlmi.errors import InputError, check_at_least_one
from dlmi.failures import mark_failures
from dlmi.framed_targets import fingerprint_targets
from dlmi.identity import check_checkpoint, check_row, run_identity, settings_of
from dlmi.method import Method
from dlmi.news import News
from dlmi.norm_gradients import scaled_norm_gradients
from dlmi.passes import StepLosses
from dlmi.precision import drop_gradient_scaler
from dlmi.ranks import Ranks
from dlmi.results import Inversion, describe_environment
from dlmi.row_building import build_row
from dlmi.saved_slots import SavedSlots, pack_slots
from dlmi.slots import Budget, Slot
from dlmi.strategy import ranks_of
from dlmi.target_queue import TargetQueue
from dlmi.token_sets import AllowedTokens, check_allowed_tokens
from dlmi.vocabulary import ForbiddenTokens


class Inverter(Method):
    """Base of all methods: leads a queue of targets through the slots.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        token_budget: Budget in token passes: tokens sent forward or backward through the LM.
        eval_every: Steps between two greedy decodes of the discrete prompt.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        seed: With the target's id it fixes the noise.

    Attributes:
        ranks: The processes of the run.
        news: What they tell each other.
        queue: Targets that wait for a slot, of any rank.
        finished: Rows of this rank; on rank 0, of all.
        folder: Where the run's files go.
        stop_requested: Set by anyone who wants the run to end after its step.
    """

    def __init__(
        self,
        prompt_length: int,
        steps: int,
        token_budget: int | None,
        eval_every: int,
        prompt_bos: bool,
        allowed_tokens: AllowedTokens,
        forbid_target_tokens: ForbiddenTokens,
        seed: int,
    ) -> None:
        super().__init__()
        check_at_least_one("model", prompt_length=prompt_length, steps=steps, eval_every=eval_every)
        if token_budget is not None:
            check_at_least_one("model", token_budget=token_budget)
        check_allowed_tokens(allowed_tokens)
        self.save_hyperparameters()
        self.prompt_length = prompt_length
        self.budget = Budget(steps, token_budget)
        self.eval_every = eval_every
        self.prompt_bos = prompt_bos
        self.allowed_tokens = allowed_tokens
        self.forbid_target_tokens = forbid_target_tokens
        self.seed = seed
        self.slots = []
        self.ranks = Ranks.alone()
        self.news = News()
        self.queue = TargetQueue(self.ranks)
        self.finished: list[Inversion] = []
        self.folder = Path()
        self.stop_requested = False
        self._finished_ids: set[str] = set()
        self._saved = SavedSlots()
        self._clock = 0.0
        self._environment: dict[str, Any] = {}

    def check_own(self, row: Inversion) -> None:
        """Raise `InputError` unless a row could have come from this very run."""
        columns = {name: self._environment[name] for name in ("fingerprint", "dtype", "target_set")}
        check_row(row, type(self).__name__, settings_of(self), **columns)

    @property
    def inversion_callbacks(self) -> list[InversionCallback]:
        """Those that follow targets."""
        return [c for c in self.trainer.callbacks if isinstance(c, InversionCallback)]  # type: ignore[attr-defined]

    # ---- Lightning's hooks, in the order of a run

    def setup(self, stage: str) -> None:
        """Refuse what would couple the slots or break the budget; forget an earlier fit."""
        check_run(self.trainer, self.data, self)
        self.ranks = ranks_of(self.trainer.strategy)
        self.data.share_targets(self.ranks)
        self.folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        self.slots, self.finished, self._finished_ids = [], [], set()
        self._saved = SavedSlots()
        self._environment = {
            **describe_environment(self.lm),
            "target_set": fingerprint_targets(self.data.targets),
        }
        self._compile = CompileDecision(self.data.compile)
        self.news = News()
        drop_gradient_scaler(self.trainer)
        self.stop_requested = False

    def configure_model(self) -> None:
        """Make one set of parameters per slot; `initialise` fills them when a target arrives."""
        if self.slots:
            return
        share = -(-len(self.data.targets) // self.ranks.size)
        count = min(self.data.batch_size, share)
        self.slots = [None] * count
        for name, shape in self.parameter_shapes().items():
            tensors = [torch.zeros(shape, dtype=self.compute_dtype) for _ in range(count)]
            setattr(self, name, nn.ParameterList(nn.Parameter(t) for t in tensors))

    def on_train_start(self) -> None:
        """Agree on what is left to do, targets in flight first, and fill the slots."""
        for callback in self.inversion_callbacks:
            self.finished += callback.earlier_rows()
        finished_ids = {row.target_id for row in self.finished} | self._saved.finished_ids
        waiting = [target.id for target in self.data.targets if target.id not in finished_ids]
        waiting.sort(key=lambda target_id: target_id not in self._saved)
        waiting = self.ranks.broadcast(waiting)
        by_id = {target.id: target for target in self.data.targets}
        self._finished_ids = by_id.keys() - set(waiting)
        self.queue = TargetQueue(self.ranks, [by_id[target_id] for target_id in waiting])
        resumed = sum(target_id in self._saved for target_id in waiting)
        if self._finished_ids or resumed:
            for callback in self.inversion_callbacks:
                callback.on_resume(self.trainer, self, len(self._finished_ids), resumed)
        for index in range(len(self.slots)):
            self._refill(index)
        self._clock = time.perf_counter()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before each step: decode what is due, report what is done, refill; stop when all is."""
        self.news.exchange(self)
        self._settle()
        if not self.active:
            self.news.exchange(self, until=lambda: self.ranks.others_have_left)
        if self.active and not self.stop_requested:
            self._charge_time()
            for callback in self.inversion_callbacks:
                callback.on_step_start(self.trainer, self, self.active)
            self._clock = time.perf_counter()
            slot = self.active[0]
            # Only passes that a gradient goes through are compiled.
            share = slot.backward_tokens / max(slot.forward_tokens, 1)
            if self._compile.is_made(share * self._steps_left(), self.lm.num_layers):
                self.lm.compiled.choose_latest()
            self._compile.start_step()
            return None
        self.trainer.should_stop = True
        return -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of every slot. Summed, not averaged: no slot feels its batch mates."""
        slots = self.active
        refined = [slot for slot in slots if self.is_refined(slot)]
        relaxed = [slot for slot in slots if not self.is_refined(slot)]
        total = torch.zeros((), device=self.device, requires_grad=True)  # of no slot in particular
        if reasoning := [slot for slot in relaxed if slot.target.reasons]:
            self.judge.reason(reasoning, self.prompt_ids(reasoning))
        with self.lm.mixed_precision(), scaled_norm_gradients(self.lm, self.norm_gradient_scale):
            if relaxed:
                step = self.losses(relaxed)
                _note(relaxed, step)
                total = total + step.losses.sum()
            if refined:
                _note(refined, self.refinement.step(refined))
        self.news.steps += len(slots)
        losses = torch.stack([slot.loss for slot in slots if slot.loss is not None])
        self.log("train/loss", losses.mean(), batch_size=1)
        return total

    def on_after_backward(self) -> None:
        """A target whose loss or gradient is not finite ends here; the others do not notice."""
        mark_failures(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step is over."""
        self._compile.end_step()

    def on_train_end(self) -> None:
        """Report what was cut short, by a signal or by the trainer's own limits; wait for all."""
        for slot in self.active:
            self._report(slot, "interrupted")
        self.ranks.leave()
        self.news.exchange(self, until=lambda: self.ranks.others_have_left, to_the_end=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the slots' future depends on, by slot: Lightning has it by place."""
        checkpoint["inversion"] = {
            "identity": run_identity(self),
            "slots": pack_slots(self),
            "finished_ids": sorted(self._finished_ids),
        }
        checkpoint["optimizer_states"] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back, once it is sure that the checkpoint belongs to this run."""
        saved = checkpoint.get("inversion")
        if saved is None:
            raise InputError("Expected `ckpt_path` to be a checkpoint of dlmi, but it is not one.")
        check_checkpoint(saved["identity"], run_identity(self))
        path = Path(str(self.trainer.ckpt_path))
        self._saved = SavedSlots.of_all_ranks({**checkpoint}, path)
        checkpoint["state_dict"] = self.state_dict()  # slots are filled when the run starts

    # ---- the life of a slot

    def _settle(self) -> None:
        self._charge_time()
        while due := [slot for slot in self.active if slot.is_due(self.eval_every, self.budget)]:
            for slot in due:
                slot.diagnostics = self.diagnostics(slot)
            self.judge.evaluate(due, self._current_ids(due))
            for callback in self.inversion_callbacks:
                callback.on_evaluation(self.trainer, self, due)
            self._charge_time()
            for slot in due:
                if slot.stop_reason(self.budget) == "budget":
                    more_ids = self.final_prompt_ids(slot)
                    if more_ids is not None:
                        self.judge.try_more(slot, more_ids)
                if reason := slot.stop_reason(self.budget):
                    self._report(slot, reason)
                    self._finished_ids.add(slot.target.id)
                    self._refill(slot.index)
            self._clock = time.perf_counter()  # measuring what is done costs the others nothing

    def _start(self, slot: Slot) -> None:
        with torch.no_grad():
            self.initialise(slot)
        self.forget_moments(slot)

    def _current_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The discrete prompts of the relaxations, or of the refinements that follow, (B, N)."""
        prompt_ids = self.prompt_ids(slots)
        for row, slot in enumerate(slots):
            if (refined_ids := self.refinement.prompt_ids(slot)) is not None:
                prompt_ids[row] = refined_ids
        return prompt_ids

    def _charge_time(self) -> None:
        now = time.perf_counter()
        for slot in self.active:
            slot.seconds += now - self._clock
        self._clock = now

    def _steps_left(self) -> float:
        """Steps of the batch until all budgets are spent, from how fast they are being spent."""
        slot = self.active[0]
        per_target = slot.step / max(self.budget.share_used(slot), 1e-9)
        left = sum(per_target - s.step for s in self.active)
        return (left + per_target * len(self.queue) / self.ranks.size) / len(self.slots)

    def _report(self, slot: Slot, reason: str) -> None:
        assert slot.best is not None
        [last_ids] = self._current_ids([slot])
        row = build_row(
            self.vocabulary,
            replace(slot, best=self.judge.decode_alone(slot, slot.best)),
            reason,
            last_ids=last_ids,
            relaxation=self.relaxation(slot),
            seed=self.seed,
            method=type(self).__name__,
            settings=settings_of(self),
            environment=self._environment,
        )
        self.finished.append(row)
        for callback in self.inversion_callbacks:
            callback.on_target_end(self.trainer, self, row)
        self.ranks.post_row(row.to_json_line())

    def _refill(self, index: int) -> None:
        """Give the slot to the next target, or leave it empty."""
        self.slots[index] = None
        target = self.queue.take()
        if target is None:
            return
        if target.id in self._saved:
            self.slots[index] = self._saved.restore(self, index, target)
            return
        slot = Slot.open(index, target, self.seed, self.device)
        self._start(slot)
        self.slots[index] = slot


def _note(slots: Sequence[Slot], step: StepLosses) -> None:
    """What a step has shown of each slot."""
    values = (step.losses if step.values is None else step.values).detach()
    for row, slot in enumerate(slots):
        slot.loss = values[row]
        slot.output_ids = step.output_ids[row, : len(slot.target_at().ids)]
        slot.step += 1
