"""A callback that measures bias and variance of gradient estimators along a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from dlmi.errors import InputError, check_at_least_one
from dlmi.gradient_rows import FILE_NAME, GradientRow, read_gradient_rows, refuse_used_file
from dlmi.gradients.estimators import ESTIMATORS, along, as_estimator, label
from dlmi.gradients.study import StudySettings, measure_state
from dlmi.gradients.truth import TruthName, check_enumerable
from dlmi.jsonl import append_line
from dlmi.methods.slot import Slot
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.identity import describe_environment
from dlmi.run.inverter import Inverter


class GradientStudy(InversionCallback):
    """Measure gradient estimators at the states of a run, into `gradients.jsonl` of its folder.

    A draw is the gradient of Z that one step of a method would use, at the run's Z and Phi before
    that step. Learned temperatures use the run's Phi with their own tau0 (`shared`: its mean);
    where the run learns none, Phi is 0 and tau is tau0. Loss, teacher forcing and samples per draw
    are the run's. The run's results, noise, cost and time do not change.

    Args:
        estimators: Which ones.
        variance_every: Steps between two measurements of the variance.
        bias_every: Steps between two measurements of the bias, which needs a truth.
        draws: Gradients drawn of each estimator; each is a mean over the run's samples.
        truth: `exact` (all prompts; small vocabularies only), `rloo` (many samples, all logits),
            `conditional` (chosen logits, the most precise) or `as_in_code`: the DLMI authors'
            reference, about 0.01 of the true gradient, to show what the paper's figure shows.
        truth_samples: Prompts that the truth takes; `conditional` takes as many for each logit.
        truth_blocks: Independent parts that they are split into.
        coordinates: Logits of a `conditional` truth: half where the gradients are largest, half
            drawn from softmax(Z).
    """

    def __init__(
        self,
        estimators: list[str] = list(ESTIMATORS),  # noqa: B006 (never changed)
        variance_every: int = 25,
        bias_every: int = 50,
        draws: int = 5,
        truth: TruthName = "rloo",
        truth_samples: int = 4096,
        truth_blocks: int = 8,
        coordinates: int = 64,
    ) -> None:
        check_at_least_one("study", variance_every=variance_every, bias_every=bias_every)
        if not estimators or len(set(estimators) & ESTIMATORS.keys()) < len(estimators):
            raise InputError(
                f"Expected `study.estimators` to name some of {', '.join(ESTIMATORS)}, each once, "
                f"but got {estimators}."
            )
        self.estimators = estimators
        self.variance_every = variance_every
        self.bias_every = bias_every
        self.settings = StudySettings(draws, truth, truth_samples, truth_blocks, coordinates)
        self.trajectory: str | None = None  # the name of the run in rows; default: its method
        self.path: Path | None = None
        self.notify: Callable[[GradientRow], None] = lambda row: None
        self._environment: dict[str, Any] = {}
        self._done: set[tuple[str, str, str, int, int]] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Check that the run has a Z to measure at, and that its prompts can be enumerated."""
        if trainer.world_size > 1:
            raise InputError(
                f"Expected a GradientStudy on one device, but the run has {trainer.world_size} "
                "workers. Set `trainer.devices` to 1, or leave the callback out."
            )
        run = as_estimator(pl_module.method)
        for name in self.estimators:
            along(run, ESTIMATORS[name])
        if self.settings.truth == "exact":
            check_enumerable(pl_module.prompt_length, len(pl_module.vocabulary))
        if any(target.is_shared or target.reasons for target in pl_module.data.targets):
            raise InputError(
                "Expected neither `data.share` nor reasoning with a GradientStudy, but got one: "
                "each step descends the loss of other examples. Leave the callback out."
            )
        self._environment = describe_environment(pl_module.lm)

    def on_train_start(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Find the file; a resumed run leaves out what its rows hold."""
        if self.path is not None:
            return
        self.path = pl_module.folder / FILE_NAME
        if trainer.ckpt_path is None and not self.continues:
            refuse_used_file(self.path)
        elif self.path.exists():
            self._done = {row.key for row in read_gradient_rows(self.path)[0]}

    def on_step_start(self, trainer: Trainer, module: Inverter, slots: list[Slot]) -> None:
        """Measure the slots that are due."""
        for slot in slots:
            with_truth = slot.step % self.bias_every == 0
            if with_truth or slot.step % self.variance_every == 0:
                # Not compiled: these passes have shapes that the run has not.
                with trainer.precision_plugin.train_step_context(), module.lm.not_compiled():
                    self._measure(module, slot, with_truth)

    def _measure(self, module: Inverter, slot: Slot, with_truth: bool) -> None:
        assert self.path is not None
        run = as_estimator(module.method)
        trajectory = self.trajectory or label(run)
        place = (trajectory, slot.target.id, module.seed, slot.step)
        estimators = [along(run, ESTIMATORS[name]) for name in self.estimators]
        estimators = [e for e in estimators if (label(e), *place) not in self._done]
        if not estimators:
            return
        for found in measure_state(run, slot, module.engine, estimators, self.settings, with_truth):
            row = GradientRow(
                trajectory=trajectory,
                target_id=slot.target.id,
                k=slot.target.k,
                step=slot.step,
                seed=module.seed,
                prompt_length=module.prompt_length,
                target_length=len(slot.target.ids),
                num_samples=run.num_samples,
                draws=self.settings.draws,
                loss=run.loss,
                teacher_forcing=run.teacher_forcing,
                **found,
                **self._environment,
            )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, row.to_json_line())
            self.notify(row)
