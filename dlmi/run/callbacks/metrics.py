"""What loggers get besides the inverter's own scalars: curves by target, histograms, texts."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.inverter import Inverter
from dlmi.run.scalars import is_log_step, publish
from dlmi.text import escape_markdown, marked_markdown, token_texts, visible

# Means over finished rows. The perplexity's is geometric: random tokens span magnitudes.
_MEANS: dict[str, Callable[[Inversion], float | None]] = {
    "mean_lcs": lambda row: row.lcs,
    "exact_rate": lambda row: row.exact,
    "mean_steps": lambda row: row.steps,
    "mean_overlap": lambda row: row.overlap_ratio,
    "mean_prompt_perplexity": lambda row: row.prompt_perplexity and math.log(row.prompt_perplexity),
}
# What belongs in one chart, for TensorBoard's page "Custom Scalars"; tags are regular expressions.
_LAYOUT = {
    "dlmi": {
        "LCS, mean of the targets in flight": ["Multiline", ["eval/lcs$", "eval/as_in_code_lcs$"]],
        "best LCS, mean of all targets begun": ["Multiline", ["eval/best_lcs$"]],
        "best LCS of each target, by its own steps": ["Multiline", ["targets/.*"]],
        "loss, relaxed and discrete": ["Multiline", ["train/loss$", "eval/discrete_loss$"]],
        "targets done": ["Multiline", ["finished/mean_lcs$", "finished/exact_rate$"]],
    }
}
_MOST_CURVES = 25  # more lines in one chart cannot be told apart


class TensorBoardDetails(InversionCallback):
    """Curves by target and cost for any logger; for TensorBoard also histograms and texts.

    Scalars under `train/` and `eval/` are means over the slots in flight, against the step of the
    run, except `best_lcs`, which counts all targets begun. Those under `finished/` run over the
    targets done so far, `cost/` over token-passes per target, and `targets/ID`, the best LCS of
    each of the first 25 targets, over the target's own steps; other loggers than TensorBoard, which
    know one axis, get them at the step of the run. With several workers those under `finished/`
    are over all of them, the others are those of worker 0.

    Args:
        text_every: Evaluations between two texts.
    """

    def __init__(self, text_every: int = 1) -> None:
        self.text_every = text_every
        self._evaluations = 0
        self._counted = 0  # rows
        self._means = {name: MeanMetric() for name in _MEANS}

    def setup(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Log the hyperparameters with the method's, which Lightning does not know."""
        for logger in trainer.loggers:
            logger.log_hyperparams(_hyperparameters(pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the layout of TensorBoard's charts."""
        for board in _tensorboards(trainer):
            board.experiment.add_custom_scalars(_LAYOUT)

    def on_before_optimizer_step(  # type: ignore[override]
        self, trainer: Trainer, pl_module: Inverter, optimizer: Optimizer
    ) -> None:
        """Gradient norm of each kind of parameter, averaged over the slots in flight."""
        if is_log_step(trainer):
            norms: dict[str, list[Tensor]] = {}
            for slot in pl_module.active:
                for name, parameter in slot.params.items():
                    if parameter.grad is not None:
                        norms.setdefault(f"train/grad_norm_{name}", []).append(
                            parameter.grad.norm()
                        )
            publish(pl_module, {name: torch.stack(found).mean() for name, found in norms.items()})

    def on_evaluation(self, trainer: Trainer, module: Inverter, slots: list[Slot]) -> None:
        """Curves with an axis of their own, histograms of the slots just decoded, their texts."""
        cost = sum(slot.cost.total for slot in slots) // len(slots)
        best = float(trainer.callback_metrics["eval/best_lcs"])
        _log_along(trainer, {"cost/best_lcs": best}, cost)
        shown = {target.id for target in module.data.targets[:_MOST_CURVES]}
        for slot in slots:
            if slot.target.id in shown and slot.best is not None:
                curve = {f"targets/{visible(slot.target.id)}": slot.best.lcs}
                _log_along(trainer, curve, slot.step)
        for board in _tensorboards(trainer):
            writer, step = board.experiment, trainer.global_step
            for name in slots[0].diagnostics:
                positions = torch.cat([slot.diagnostics[name].float().flatten() for slot in slots])
                writer.add_histogram(f"{name}_per_position", positions.cpu(), step)
            for slot in slots if self._evaluations % self.text_every == 0 else ():
                writer.add_text(f"slot {slot.index}", _slot_markdown(module.lm, slot), step)
        self._evaluations += 1

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Running means over the finished targets, those before a resume included."""
        own = {"finished/lcs": row.lcs, "finished/steps": row.steps}
        _log_along(trainer, {**self._finished_means(module), **own}, self._counted)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """The same means for whoever reads `callback_metrics` after the run."""
        pl_module.log_dict(self._finished_means(pl_module), logger=False, batch_size=1)

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Log the hyperparameters with the final metrics."""
        for board in _tensorboards(trainer) if pl_module.finished else ():
            means = self._finished_means(pl_module, "final")
            board.log_hyperparams(_hyperparameters(pl_module), means)
            board.save()

    def _finished_means(self, module: Inverter, section: str = "finished") -> dict[str, float]:
        for row in module.finished[self._counted :]:
            for name, metric in self._means.items():
                if (value := _MEANS[name](row)) is not None:
                    metric.update(value)
        self._counted = len(module.finished)
        means = {n: float(m.compute()) for n, m in self._means.items() if m.update_called}
        if "mean_prompt_perplexity" in means:
            means["mean_prompt_perplexity"] = math.exp(means["mean_prompt_perplexity"])
        return {f"{section}/{name}": mean for name, mean in means.items()}


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def _log_along(trainer: Trainer, scalars: dict[str, float], place: int) -> None:
    """Log at a place on an axis of their own, where a logger has one for each curve."""
    for logger in trainer.loggers:
        has_axes = isinstance(logger, TensorBoardLogger)
        logger.log_metrics(scalars, place if has_axes else trainer.global_step)


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
    return "| what | text |\n|---|---|\n" + "\n".join(f"| {k} | {v} |" for k, v in rows.items())


def _escaped(lm: FrozenLM, ids: Sequence[int]) -> str:
    return escape_markdown("".join(token_texts(lm, ids)))
