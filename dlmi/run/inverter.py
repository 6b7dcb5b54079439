"""The inverter: a LightningModule that inverts a queue of targets, one in each of its slots.

Its only parameters are those of the slots, `prompts.i = {Z, Phi}`; the LM belongs to the data
module, the equations to the method. A training step is one step of every slot. A slot whose target
has ended reports a row and takes the next target of a queue that all workers share.
"""

import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from dlmi.errors import InputError, check_at_least_one
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.norm_gradients import NormGradientScale
from dlmi.lm.pass_dtype import PassDType, pass_copy
from dlmi.lm.precision import drop_gradient_scaler
from dlmi.methods.base import Method, settings_of
from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.budget import Budget
from dlmi.run.checks import check_settings, check_targets, check_trainer
from dlmi.run.data import TargetDataModule
from dlmi.run.folder import run_folder
from dlmi.run.identity import check_checkpoint, describe_environment, run_identity
from dlmi.run.norm_scale import choose_scale, with_scale
from dlmi.run.resume import Resume, pack_slot
from dlmi.run.row_building import build_row
from dlmi.run.scalars import check_early_stopping, evaluation_scalars, publish
from dlmi.run.slot_pool import SlotPool
from dlmi.run.workers.strategy import workers_of
from dlmi.run.workers.workers import Workers
from dlmi.scoring.engine import Engine
from dlmi.scoring.fluency import Fluency
from dlmi.targets.target import fingerprint_targets, with_start_ids
from dlmi.tokens.forbidden import ForbiddenTokens
from dlmi.tokens.token_sets import AllowedTokens
from dlmi.tokens.vocabulary import Vocabulary, token_sets_of


class Inverter(SlotPool):
    """Inverts a queue of targets by a method.

    Args:
        method: How prompts are found.
        prompt_length: Tokens of a prompt, N.
        steps: Budget: steps that a target may use; unset: the method's own.
        token_budget: Budget in token-passes: tokens sent forward or backward through the LM,
            everything included. It is never overrun.
        eval_every: Steps between two greedy decodes of the discrete prompt; unset: the method's.
            A search decodes when teacher forcing says that its prompt is exact, and whenever its
            cost has doubled.
        decode_at: For such a search, budgets at which it is decoded as well.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line. The
            method's own sets hold besides; an explicit `all` lifts its `ascii` and `printable`.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, its `words`, or
            its words and their near-copies (`stems`).
        fluency: Weight of a penalty on prompts that the LM finds unlikely; 0 for none.
        norm_gradient_scale: Factor on gradients at the LM's norm layers, or `auto` to try a few,
            once for each LM; unset: the method's own.
        pass_dtype: What the LM searches in: a dtype, or `auto` for the fastest on this machine,
            which is measured once; unset: `data.dtype`, which all that is kept is measured in.
        seed: With the target's id it fixes all draws. On the command line: `seed_everything`.

    Attributes:
        workers: The processes of the run.
        finished: Rows of this worker; on worker 0, those of all workers so far.
        folder: Where the run's files go.
        stop_requested: Set it to end the run after its step.
        measures_forms: Whether the rows of finished targets hold the LCS matrix.
    """

    def __init__(
        self,
        method: Method,  # type: ignore[type-arg]  # jsonargparse would make a `Method[Any]`
        prompt_length: int = 80,
        steps: int | None = None,
        token_budget: int | None = None,
        eval_every: int | None = None,
        decode_at: list[int] | None = None,
        prompt_bos: bool = False,
        allowed_tokens: AllowedTokens | None = None,
        forbid_target_tokens: ForbiddenTokens = "none",
        fluency: float = 0.0,
        norm_gradient_scale: NormGradientScale | None = None,
        pass_dtype: PassDType | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(method, prompt_length, fluency, seed)
        own = method.defaults()
        steps = own.steps if steps is None else steps
        eval_every = own.eval_every if eval_every is None else eval_every
        counts = {"steps": steps, "token_budget": token_budget, "eval_every": eval_every}
        check_at_least_one("model", prompt_length=prompt_length, **counts)
        check_settings(prompt_length, fluency, norm_gradient_scale, allowed_tokens)
        self.save_hyperparameters(ignore=["method"])  # an object would make checkpoints unreadable
        self.steps = steps
        self.token_budget = token_budget
        self.eval_every = eval_every
        self.decode_at = decode_at or []
        self.prompt_bos = prompt_bos
        self.allowed_tokens = allowed_tokens
        self.forbid_target_tokens = forbid_target_tokens
        self.norm_gradient_scale = norm_gradient_scale
        self.pass_dtype: PassDType | None = pass_dtype
        self.workers = Workers()
        self.finished: list[Inversion] = []
        self.stop_requested = False
        self.measures_forms = True

    @property
    def data(self) -> TargetDataModule:
        """The data module of the run."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TargetDataModule):
            raise InputError("Expected `Trainer.fit` to get a TargetDataModule as `datamodule`.")
        return data

    @property
    def lm(self) -> FrozenLM:
        """The frozen LM."""
        return self.data.lm

    @property
    def unfinished(self) -> int:
        """How many targets have no final row yet, as far as this worker knows."""
        done = {row.target_id for row in self.finished if row.stop_reason != "interrupted"}
        return len(self._targets) - len(done | self._finished_ids)

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the run and of its method; those left to the method are filled in.

        `precision` is that of training passes; None is the LM's own dtype, as in measurements.
        """
        own = settings_of(self.method)
        settings = {**own, **{name: getattr(self, name) for name in _ARGUMENTS}}
        if self.norm_gradient_scale is None:
            settings["norm_gradient_scale"] = own.get("norm_gradient_scale", 1.0)
        precision = self.trainer.precision
        return {**settings, "precision": None if precision == "32-true" else precision}

    def check(self, trainer: Trainer, data: TargetDataModule) -> None:
        """Raise `InputError` for what cannot run; also called before other workers are started."""
        self._targets = with_start_ids(data.targets, (data.lm.bos_id,) if self.prompt_bos else ())
        sets = token_sets_of(self.allowed_tokens, self.method.defaults().token_sets)
        self.vocabulary = Vocabulary(data.lm, sets, self.forbid_target_tokens)
        check_trainer(trainer, data)
        check_targets(self._targets, self.method, self.vocabulary, self.prompt_length, self.fluency)

    # ---- Lightning's hooks, in the order of a run

    def setup(self, stage: str) -> None:
        """Share the targets, check the run, and reset what an earlier fit left."""
        self.workers = workers_of(self.trainer.strategy)
        self.data.share_targets(self.workers)
        self.check(self.trainer, self.data)
        fluency = Fluency(self.vocabulary, self.fluency) if self.fluency else None
        count = min(self.data.batch_size, -(-len(self._targets) // self.workers.size))
        self.slots = [None] * count
        self.engine = Engine(self.vocabulary, fluency, self.norm_gradient_scale, count)
        self.engine.read_with(pass_copy(self.lm, self.pass_dtype))
        self.budget = Budget(
            self.steps,
            self.token_budget,
            self.method.num_last_prompts,
            self.eval_every,
            tuple(self.decode_at),
        )
        self.check_budget(self._targets)
        self._scale: float | None = None  # what `auto` stands for, once it is known
        self.folder = run_folder(self.trainer)
        self.finished, self._resume, self.stop_requested = [], Resume(), False
        self._solved_groups: set[str | None] = set()
        target_set = fingerprint_targets(self.data.targets)
        self._environment = {**describe_environment(self.lm), "target_set": target_set}
        name, allowed_ids = type(self.method).__name__, self.vocabulary.fingerprint()
        self.identity = run_identity(name, self.settings, self._environment, allowed_ids)
        drop_gradient_scaler(self.trainer)

    def on_train_start(self) -> None:
        """Agree with the other workers on what is left to do, and fill the slots.

        Targets that were in flight when the run stopped come first.
        """
        self._choose_scale()
        done = {row.target_id for row in self.finished} | self._resume.finished_ids
        waiting = [target.id for target in self._targets if target.id not in done]
        waiting.sort(key=lambda target_id: target_id not in self._resume)
        waiting = self.workers.broadcast(waiting)
        by_id = {target.id: target for target in self._targets}
        own = self.workers.take_from([by_id[target_id] for target_id in waiting])
        self._waiting = (target for target in own if target.group not in self._solved_groups)
        self._finished_ids = by_id.keys() - set(waiting)
        resumed = sum(target_id in self._resume for target_id in waiting)
        if self._finished_ids or resumed:
            self._tell("on_resume", len(self._finished_ids), resumed)
        self.refill(self._waiting, self._resume)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before each step: decode what is due, report what has ended, refill, or stop the run."""
        self._settle()
        if self.active and not self.stop_requested:
            self._tell("on_step_start", self.active)
            self.lap(is_charged=False)
            return None
        self.trainer.should_stop = True
        return -1

    def on_train_end(self) -> None:
        """Report the targets that a signal or the trainer's own limits have interrupted."""
        if self.eval_every is None:  # a search, whose last decode may be long ago
            unseen = [
                slot for slot in self.active if slot.last is None or slot.last.step < slot.step
            ]
            self.evaluate(unseen)
        for slot in self.active:
            self._report(slot, "interrupted")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the slots by target; Lightning would save tensors by their place."""
        checkpoint["inversion"] = {
            "identity": self.identity,
            "pass_dtype": self.engine.pass_dtype,
            "norm_gradient_scale": self._scale,
            "slots": [pack_slot(slot, self.trainer.optimizers) for slot in self.active],
            "finished_ids": sorted(self._finished_ids),
        }
        checkpoint["state_dict"], checkpoint["optimizer_states"] = {}, []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back the slots of all workers, if the checkpoint belongs to this run."""
        saved = checkpoint["inversion"]
        check_checkpoint(saved["identity"], self.identity)
        if self.pass_dtype == "auto":  # as on the machine where it began
            self.engine.read_with(pass_copy(self.lm, saved["pass_dtype"]))
        self._scale = saved.get("norm_gradient_scale")
        self._resume = Resume.of_all_workers(saved, Path(str(self.trainer.ckpt_path)))
        checkpoint["state_dict"] = self.state_dict()  # slots are filled when the run starts

    def _choose_scale(self) -> None:
        """Find the number that `norm_gradient_scale: auto` stands for; worker 0's holds for all."""
        if with_scale(self.settings, None) == self.settings:
            return
        if self._scale is None and self.workers.index == 0:
            self._scale = choose_scale(self.lm)
        self._scale = self.engine.auto_scale = self.workers.broadcast(self._scale)

    # ---- the life of a slot

    def _settle(self) -> None:
        """Decode what is due, report what has ended and refill, until nothing is left to do."""
        self.lap()
        while True:
            due = [slot for slot in self.active if self.budget.is_due(slot)]
            if due:
                self.evaluate(due)
                publish(self, evaluation_scalars(due, self.active, self.finished))
                self._tell("on_evaluation", due)
                check_early_stopping(self.trainer, self)
                self.lap()
            done = [slot for slot in self.active if self.budget.stop_reason(slot)]
            if not (due or done):
                return
            for slot in done:
                if self.slots[slot.index] is slot:  # or another of its group was solved just now
                    self._finish(slot)
            self.refill(self._waiting, self._resume)

    def _finish(self, slot: Slot) -> None:
        """Report a slot and empty it; if it solves its group, the others leave without a row."""
        if self.budget.stop_reason(slot) == "budget" and self.method.num_last_prompts:
            self.try_last(slot)
        reason, group, leaving = self.budget.stop_reason(slot), slot.target.group, [slot]
        assert reason is not None
        self._report(slot, reason)
        if reason == "solved" and group is not None:
            self._solved_groups.add(group)
            leaving = [other for other in self.active if other.target.group == group]
        for each in leaving:
            self._finished_ids.add(each.target.id)
            self.slots[each.index] = None

    def _report(self, slot: Slot, reason: str) -> None:
        settings = {**self.settings, "pass_dtype": self.engine.pass_dtype}  # what was chosen
        settings = with_scale(settings, self._scale)
        # Not after Ctrl-C, which should end soon
        with_forms = self.measures_forms and reason in ("solved", "budget")
        row = build_row(slot, reason, self.method, settings, self._environment, with_forms)
        self.finished.append(row)
        self._tell("on_target_end", row)

    def _tell(self, event: str, *what: Any) -> None:
        """Call a hook of all callbacks that follow targets (`run.callbacks.base`)."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, event):
                getattr(callback, event)(self.trainer, self, *what)


_ARGUMENTS = [*inspect.signature(Inverter).parameters][1:]  # all but the method
