"""Bias and variance of gradient estimators, measured along a run that does not notice it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer

from dlmi.callbacks.base import InversionCallback
from dlmi.errors import InputError, check_at_least_one
from dlmi.gradients.measured import ESTIMATORS, MeasuredEstimator, MeasuredName
from dlmi.gradients.objective import target_objective
from dlmi.gradients.rows import (
    FILE_NAME,
    GradientRow,
    read_gradient_rows,
    refuse_used_file,
)
from dlmi.gradients.study import Measurement, State, StudySettings, measure_state
from dlmi.gradients.truth import TruthName, check_enumerable
from dlmi.results import append_line, describe_environment
from dlmi.slots import Slot

if TYPE_CHECKING:
    from dlmi.inverter import Inverter


class GradientStudy(InversionCallback):
    """Measure gradient estimators at the states of a run, into `gradients.jsonl` of its folder.

    All of them are measured at the same Z and Phi: those of the run, before the step in question.
    Learned temperatures follow the run's Phi, each under its own tau0 (`shared`: its mean); where
    the run learns none, Phi is 0 and tau is tau0. Loss, teacher forcing and samples per draw are
    the run's. The run's result, its noise and its account of cost and time stay as they are.

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
        estimators: list[MeasuredName] = list(ESTIMATORS),  # noqa: B006 (never changed)
        variance_every: int = 25,
        bias_every: int = 50,
        draws: int = 5,
        truth: TruthName = "rloo",
        truth_samples: int = 4096,
        truth_blocks: int = 8,
        coordinates: int = 64,
    ) -> None:
        check_at_least_one("study", variance_every=variance_every, bias_every=bias_every)
        if not estimators or len(set(estimators)) < len(estimators):
            raise InputError(
                "Expected `study.estimators` to name at least one estimator, each once, but got "
                f"{estimators}."
            )
        self.estimators = [ESTIMATORS[name] for name in estimators]
        self.variance_every = variance_every
        self.bias_every = bias_every
        self.settings = StudySettings(draws, truth, truth_samples, truth_blocks, coordinates)
        self.trajectory: str | None = None  # how rows call the run, if not by its estimator
        self.path: Path | None = None
        self.notify: Callable[[GradientRow], None] = lambda row: None
        self._run_estimator: MeasuredEstimator | None = None
        self._environment: dict[str, Any] = {}
        self._done: set[tuple[str, str, str, int, int]] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse runs that have no Z to measure at, and prompts that cannot be enumerated."""
        if trainer.world_size > 1:
            raise InputError(
                f"Expected a GradientStudy on one device, but the run has {trainer.world_size} "
                "ranks. Set `trainer.devices` to 1, or leave the callback out."
            )
        module: Any = pl_module
        self._run_estimator = estimator_of(module)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self.settings.truth == "exact":
            check_enumerable(module.prompt_length, len(module.vocabulary))
        if any(target.shared is not None for target in data.targets):
            raise InputError(
                "Expected `data.shared: false` with a GradientStudy, but it is true: each step "
                "descends the loss of other examples. Leave the callback out."
            )
        if _num_samples(module) < 2 and any(e.kind == "rloo" for e in self.estimators):
            raise InputError(
                "Expected at least 2 samples per step with the estimator `rloo`, but the run has "
                f"{_num_samples(module)}. Raise `num_samples`, or leave `rloo` out."
            )
        self._environment = describe_environment(data.lm)

    def on_train_start(self, trainer: Trainer, pl_module: "Inverter") -> None:  # type: ignore[override]
        """Find the file; a resumed run goes on where its rows end."""
        if self.path is not None:
            return
        self.path = pl_module.folder / FILE_NAME
        if trainer.ckpt_path is None and not self.continues:
            refuse_used_file(self.path)
        elif self.path.exists():
            self._done = {row.key for row in read_gradient_rows(self.path)[0]}

    def on_step_start(self, trainer: Trainer, module: "Inverter", slots: list[Slot]) -> None:
        """Measure the slots that are due."""
        for slot in slots:
            with_truth = slot.step % self.bias_every == 0
            if with_truth or slot.step % self.variance_every == 0:
                # As in a training step, but never compiled: a run's choice of shape is its own.
                autocast = trainer.precision_plugin.train_step_context()
                with module.lm.compiled.paused(), autocast, module.lm.mixed_precision():
                    self._measure(module, slot, with_truth)

    def _measure(self, module: Any, slot: Slot, with_truth: bool) -> None:
        assert self._run_estimator is not None
        assert self.path is not None
        trajectory = self.trajectory or self._run_estimator.label
        place = (trajectory, slot.target.id, module.seed, slot.step)
        estimators = [e for e in self.estimators if (e.label, *place) not in self._done]
        objective = target_objective(
            module.vocabulary, slot.target, module.loss, module.teacher_forcing, module.prompt_bos
        )
        measurements = measure_state(
            objective,
            _state(module, slot),
            estimators,
            self.settings,
            _num_samples(module),
            lambda purpose: slot.noise_seed(f"gradients/{purpose}"),
            with_truth,
        )
        for measurement in measurements if estimators else ():
            row = self._row(module, slot, trajectory, measurement)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, row.to_json_line())
            self.notify(row)

    def _row(self, module: Any, slot: Slot, trajectory: str, found: Measurement) -> GradientRow:
        return GradientRow(
            estimator=found.estimator.label,
            trajectory=trajectory,
            target_id=slot.target.id,
            k=slot.target.k,
            step=slot.step,
            seed=module.seed,
            prompt_length=module.prompt_length,
            target_length=len(slot.target.ids),
            num_samples=_num_samples(module),
            draws=self.settings.draws,
            tau=found.tau,
            truth=found.truth,
            loss=module.loss,
            teacher_forcing=module.teacher_forcing,
            **found.statistics,
            **self._environment,
        )


def estimator_of(module: Any) -> MeasuredEstimator:
    """The estimator that a method descends by; `InputError` if it has none of those studied."""
    if getattr(module, "next_token", "greedy") != "greedy":
        raise InputError(
            "Expected `model.next_token: greedy` with a GradientStudy, but got "
            f"{module.next_token!r}: its loss has noise of its own."
        )
    if (baseline := getattr(module, "baseline", None)) is not None:
        return MeasuredEstimator(baseline)
    sampler = getattr(module, "sampler", None)
    if sampler is None:
        raise InputError(
            "Expected a GradientStudy on DLMI, GBDA or REINFORCE, whose Z are logits of a "
            f"distribution, but the method is {type(module).__name__}. Leave the callback out."
        )
    temperature: Any = getattr(module, "temperature", "fixed")
    tau0 = module.tau0 if hasattr(module, "tau0") else module.initial_tau
    return MeasuredEstimator(sampler.estimator, temperature, tau0, sampler.rao_draws)


def _state(module: Any, slot: Slot) -> State:
    logits = module.Z[slot.index].detach()
    phi = logits.new_zeros(len(logits))
    if "Phi" in module.parameter_shapes():
        phi = module.Phi[slot.index].detach().expand(len(logits))
    is_ema = getattr(module, "baseline", None) == "ema"
    return State(logits, phi, slot.memory.get("average") if is_ema else None)


def _num_samples(module: Any) -> int:
    sampler = getattr(module, "sampler", module)
    count: int = sampler.num_samples
    return count
