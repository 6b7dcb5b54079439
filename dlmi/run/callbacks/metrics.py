"""What TensorBoard shows beside the loss: honest LCS, temperatures, gradients, the text itself."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.inverter import Inverter
from dlmi.text import escape_markdown, marked_markdown, token_texts

# Means over finished rows. That of the perplexity is geometric: random tokens span magnitudes.
_MEANS: dict[str, Callable[[Inversion], float | None]] = {
    "mean_lcs": lambda row: row.lcs,
    "exact_rate": lambda row: row.exact,
    "mean_steps": lambda row: row.steps,
    "mean_overlap": lambda row: row.overlap_ratio,
    "mean_prompt_perplexity": lambda row: row.prompt_perplexity and math.log(row.prompt_perplexity),
}


class TensorBoardDetails(InversionCallback):
    """Scalars, histograms, texts and final hyperparameter metrics for TensorBoard.

    Scalars under `train/` and `eval/` are means over the slots in flight, against the step of the
    run, except `best_lcs`, which counts all targets begun; those under `finished/` run over the
    targets done so far; the axis of `cost/` is token-passes per target, not steps. With several
    workers those under `finished/` are over all of them, the others are those of worker 0.

    Args:
        text_every: Evaluations between two texts.
    """

    def __init__(self, text_every: int = 1) -> None:
        self.text_every = text_every
        self._evaluations = 0
        self._counted = 0  # rows
        self._means = {name: MeanMetric() for name in _MEANS}

    def setup(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Hyperparameters, so that they are in `hparams.yaml`: Lightning knows no method."""
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.log_hyperparams(_hyperparameters(pl_module))

    def on_before_optimizer_step(  # type: ignore[override]
        self, trainer: Trainer, pl_module: Inverter, optimizer: Optimizer
    ) -> None:
        """Gradient norm of each kind of parameter, averaged over the slots in flight."""
        every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (trainer.global_step + 1) % every_n_steps:
            return
        norms: dict[str, list[Tensor]] = {}
        for slot in pl_module.active:
            for name, parameter in slot.params.items():
                if parameter.grad is not None:
                    norms.setdefault(name, []).append(parameter.grad.norm())
        for name, values in norms.items():
            pl_module.log(f"train/grad_norm_{name}", torch.stack(values).mean(), batch_size=1)

    def on_evaluation(self, trainer: Trainer, module: Inverter, slots: list[Slot]) -> None:
        """Means over the slots just decoded, histograms of their temperatures, one text."""
        logger, step = trainer.logger, trainer.global_step
        if not isinstance(logger, TensorBoardLogger):
            return
        latest = [slot.last for slot in slots if slot.last is not None]
        values: dict[str, list[float]] = {
            "lcs": [e.lcs for e in latest],
            "as_in_code_lcs": [e.as_in_code_lcs for e in latest if e.as_in_code_lcs is not None],
            "discrete_loss": [e.discrete_loss for e in latest],
            "token_passes": [slot.cost.total for slot in slots],
            "soft_to_hard_gap": [e.discrete_loss - e.loss for e in latest if e.loss is not None],
            # Over all targets begun: if those that are done did not count, success would lower it.
            "best_lcs": [found.lcs for found in module.finished]
            + [slot.best.lcs for slot in module.active if slot.best is not None],
        }
        for name in slots[0].diagnostics:
            positions = torch.cat([slot.diagnostics[name].float().flatten() for slot in slots])
            values[name] = positions.tolist()
            logger.experiment.add_histogram(f"{name}_per_position", positions.cpu(), step)
        means = {f"eval/{name}": fmean(found) for name, found in values.items() if found}
        logger.log_metrics(means, step)
        cost = sum(slot.cost.total for slot in slots) // len(slots)
        logger.log_metrics({"cost/best_lcs": means["eval/best_lcs"]}, cost)
        if self._evaluations % self.text_every == 0:
            for slot in slots:
                text = _slot_markdown(module.lm, slot)
                logger.experiment.add_text(f"slot {slot.index}", text, step)
        self._evaluations += 1

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Running means over the finished targets, those before a resume included."""
        if isinstance(trainer.logger, TensorBoardLogger):
            found = {**self._finished_means(module), "lcs": row.lcs, "steps": row.steps}
            scalars = {f"finished/{name}": value for name, value in found.items()}
            trainer.logger.log_metrics(scalars, self._counted)

    def _finished_means(self, module: Inverter) -> dict[str, float]:
        for row in module.finished[self._counted :]:
            for name, metric in self._means.items():
                if (value := _MEANS[name](row)) is not None:
                    metric.update(value)
        self._counted = len(module.finished)
        means = {n: float(m.compute()) for n, m in self._means.items() if m.update_called}
        if "mean_prompt_perplexity" in means:
            means["mean_prompt_perplexity"] = math.exp(means["mean_prompt_perplexity"])
        return means

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Hyperparameters with the final metrics."""
        if pl_module.finished and isinstance(trainer.logger, TensorBoardLogger):
            means = self._finished_means(pl_module)
            final = {f"final/{n}": means[n] for n in ("mean_lcs", "exact_rate", "mean_steps")}
            trainer.logger.log_hyperparams(_hyperparameters(pl_module), final)
            trainer.logger.save()


def _hyperparameters(module: Inverter) -> dict[str, Any]:
    """Settings of the method, of the run and of its data, by name."""
    data = module.data
    settings = {"method": type(module.method).__name__, **module.settings, **data.hparams}
    parts = {"targets": data.source, "load": data.load_options, "share": data.share}
    for name, part in parts.items():
        if part is not None:
            settings[name] = type(part).__name__
            settings |= {f"{name}.{key}": value for key, value in vars(part).items()}
    return {
        name: list(value) if isinstance(value, tuple) else value  # as YAML files have it
        for name, value in settings.items()
        if not name.startswith("_")
    }


def _slot_markdown(lm: FrozenLM, slot: Slot) -> str:
    """The target, the output with differences in bold brackets, and the prompt, as a table."""
    last, target = slot.last, slot.target
    assert last is not None
    rows = {
        f"target {escape_markdown(target.id)}": _escaped(lm, target.ids),
        f"output, LCS {last.lcs:.2f}": marked_markdown(lm, target.ids, last.output_ids),
        f"prompt after {last.step} steps": _escaped(lm, last.prompt_ids),
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {k} | {v} |" for k, v in rows.items())


def _escaped(lm: FrozenLM, ids: Sequence[int]) -> str:
    return escape_markdown("".join(token_texts(lm, ids)))
