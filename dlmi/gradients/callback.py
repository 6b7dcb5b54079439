"""A callback that measures bias and variance of gradient estimators along a run."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from dlmi.errors import InputError, check_at_least_one
from dlmi.gradient_rows import FILE_NAME, GradientRow, read_gradient_rows, refuse_used_file
from dlmi.gradients.estimators import (
    ESTIMATORS,
    DrawSlot,
    Estimator,
    along,
    as_estimator,
    draw_gradients,
    hard_loss,
    is_sparse,
    label,
    state_along,
)
from dlmi.gradients.statistics import describe_truth, expected_events, measure
from dlmi.gradients.truth import (
    AS_IN_CODE_DRAWS,
    HardLoss,
    Truth,
    TruthName,
    as_in_code_reference,
    choose_coordinates,
    conditional_truth,
    exact_truth,
    rloo_truth,
    sample_prompts,
)
from dlmi.jsonl import append_line
from dlmi.methods.slot import Slot
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.identity import describe_environment
from dlmi.run.inverter import Inverter
from dlmi.scoring.passes import Reader

_PILOT_BATCHES = 4


@dataclass(eq=False)
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

    estimators: list[str] = field(default_factory=lambda: list(ESTIMATORS))
    variance_every: int = 25
    bias_every: int = 50
    draws: int = 5
    truth: TruthName = "rloo"
    truth_samples: int = 4096
    truth_blocks: int = 8
    coordinates: int = 64

    def __post_init__(self) -> None:
        self.trajectory: str | None = None  # the name of the run in rows; default: its method
        self.path: Path | None = None
        self.notify: Callable[[GradientRow], None] = lambda row: None
        self._environment: dict[str, Any] = {}
        self._done: set[tuple[str, str, str, int, int]] = set()
        every = {"variance_every": self.variance_every, "bias_every": self.bias_every}
        check_at_least_one("study", **every, coordinates=self.coordinates)
        known = ESTIMATORS.keys() & set(self.estimators)
        if not known or len(known) < len(self.estimators):
            raise InputError(
                f"Expected `study.estimators` to name some of {', '.join(ESTIMATORS)}, each once, "
                f"but got {self.estimators}."
            )
        for name, count in (("draws", self.draws), ("truth_blocks", self.truth_blocks)):
            if count < 3:
                raise InputError(
                    f"Expected `study.{name}` to be at least 3, but got {count}: an interval "
                    "leaves one out and needs two more."
                )
        if self.truth_samples < 2 * self.truth_blocks:
            raise InputError(
                "Expected `study.truth_samples` to be at least twice `study.truth_blocks` "
                f"({2 * self.truth_blocks}), but got {self.truth_samples}."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Check that the run has a Z to measure at, and one loss."""
        if trainer.world_size > 1:
            raise InputError(
                f"Expected a GradientStudy on one device, but the run has {trainer.world_size} "
                "workers. Set `trainer.devices` to 1, or leave the callback out."
            )
        run = as_estimator(pl_module.method)
        for name in self.estimators:
            along(run, ESTIMATORS[name])
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
                    self._write_rows(module, slot, with_truth)

    def _write_rows(self, module: Inverter, slot: Slot, with_truth: bool) -> None:
        assert self.path is not None
        run = as_estimator(module.method)
        trajectory = self.trajectory or label(run)
        place = (trajectory, slot.target.id, module.seed, slot.step)
        estimators = [along(run, ESTIMATORS[name]) for name in self.estimators]
        estimators = [e for e in estimators if (label(e), *place) not in self._done]
        if not estimators:
            return
        for found in self.measure(run, slot, module.engine, estimators, with_truth):
            row = GradientRow(
                trajectory=trajectory,
                target_id=slot.target.id,
                k=slot.target.k,
                step=slot.step,
                seed=module.seed,
                prompt_length=module.prompt_length,
                target_length=len(slot.target.ids),
                num_samples=run.num_samples,
                draws=self.draws,
                loss=run.loss,
                teacher_forcing=run.teacher_forcing,
                **found,
                **self._environment,
            )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, row.to_json_line())
            self.notify(row)

    def measure(
        self,
        run: Estimator,
        slot: Slot,
        reader: Reader,
        estimators: Sequence[Estimator],
        with_truth: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """Measure estimators with the run's loss, decode and samples at the values of its slot.

        Yields the fields `estimator`, `tau`, `truth` and the statistics of a `GradientRow`.
        """
        logits, samples = slot.params["Z"].detach(), run.num_samples
        loss = hard_loss(run, slot, reader)

        @functools.cache
        def pilot_loss() -> Tensor:
            seed = slot.seed("gradients/average")
            return loss(sample_prompts(logits, _PILOT_BATCHES * samples, seed)).mean()

        states = [state_along(run, slot.state, method, pilot_loss) for method in estimators]
        pairs = list(zip(estimators, states, strict=True))
        truth, description = None, None
        if with_truth:
            pilots = (draw_gradients(*pair, slot, ["pilot"], reader)[0] for pair in pairs)
            truth = self._find_truth(loss, slot, samples, pilots)
            description = describe_truth(truth)
        events = expected_events(logits, self.draws, samples, truth)
        for method, state in pairs:
            gradients = draw_gradients(method, state, slot, range(self.draws), reader)
            tau = method.diagnostics(DrawSlot.of(slot, method), state).get("tau")
            yield {
                "estimator": label(method),
                "tau": None if tau is None else float(tau.mean()),
                "truth": description,
                **measure(gradients, truth, events if is_sparse(method) else (math.inf, math.inf)),
            }

    def _find_truth(
        self, loss: HardLoss, slot: Slot, samples: int, pilots: Iterator[Tensor]
    ) -> Truth:
        logits, count = slot.params["Z"].detach(), self.truth_samples
        if self.truth == "exact":
            return exact_truth(loss, logits)
        if self.truth == "conditional":
            seeds = [slot.seed(f"gradients/{purpose}") for purpose in ("coordinates", "truth")]
            chosen = choose_coordinates(logits, pilots, self.coordinates, seeds[0])
            return conditional_truth(loss, logits, chosen, count, self.truth_blocks, seeds[1])
        blocks = self.truth_blocks if self.truth == "rloo" else AS_IN_CODE_DRAWS
        seeds = [slot.seed(f"gradients/truth/{block}") for block in range(blocks)]
        if self.truth == "rloo":
            return rloo_truth(loss, logits, count, seeds)
        return as_in_code_reference(loss, logits, samples, seeds)
