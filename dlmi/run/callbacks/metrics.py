"""What loggers get besides the inverter's own scalars: curves by target, histograms, texts."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard.summary import text
from torchmetrics import MeanMetric

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.base import Method
from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.scalars import is_log_step, log_scalars, publish, relaxed_diagnostics
from dlmi.text import counted, escape_markdown, markdown_code, marked_markdown, token_texts, visible

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
        "exact targets, by targets done": ["Multiline", ["finished/exact$"]],
    }
}
_MOST_TARGETS = 25  # with curves and texts; more lines in one chart cannot be told apart


class TensorBoardDetails(InversionCallback):
    """Curves by target and cost for any logger; for TensorBoard also histograms and texts.

    Scalars under `train/` and `eval/` are means over the slots in flight, against the step of the
    run, except `best_lcs`, which is over all targets begun. Those under `finished/` run over the
    targets done so far, and `cost/` over the token-passes of all targets together. The first 25
    targets also have a curve of their best LCS (`targets/ID`), histograms over positions
    (`per_position_tau/ID`) and texts (`prompts/ID`), against their own steps. Other loggers than
    TensorBoard, which know one axis, get scalars at the step of the run. With several workers
    those under `finished/` are over all of them, the others are those of worker 0.

    Args:
        text_every: Evaluations between two texts of a target.
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
        """Curves with an axis of their own; histograms and texts of the slots just decoded."""
        rows = sum(row.forward_tokens + row.backward_tokens for row in module.finished)
        cost = rows + sum(slot.cost.total for slot in module.active)
        best = float(trainer.callback_metrics["eval/best_lcs"])
        _log_along(trainer, {"cost/best_lcs": best}, cost)
        shown = {target.id for target in module.data.targets[:_MOST_TARGETS]}
        has_text = self._evaluations % self.text_every == 0
        for slot in (slot for slot in slots if slot.target.id in shown):
            assert slot.best is not None
            name = visible(slot.target.id)
            _log_along(trainer, {f"targets/{name}": slot.best.lcs}, slot.step)
            for board in _tensorboards(trainer):
                for kind, positions in relaxed_diagnostics(slot).items():
                    tag = f"per_position_{kind}/{name}"
                    board.experiment.add_histogram(tag, positions.float().cpu(), slot.step)
                if has_text:
                    _add_text(board, f"prompts/{name}", _slot_markdown(module.lm, slot), slot.step)
        self._evaluations += 1

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Running means over the finished targets, those before a resume included."""
        exact = sum(row.exact for row in module.finished)
        own = {"finished/lcs": row.lcs, "finished/steps": row.steps, "finished/exact": exact}
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
        log_scalars(logger, scalars, place if has_axes else trainer.global_step)


@rank_zero_only  # other workers have a writer without files
def _add_text(board: TensorBoardLogger, tag: str, markdown: str, step: int) -> None:
    """As `SummaryWriter.add_text`, which would add `/text_summary` to the tag."""
    summary = text(tag, markdown)  # type: ignore[no-untyped-call]
    summary.value[0].tag = tag
    board.experiment.file_writer.add_summary(summary, step)


def _hyperparameters(module: Inverter) -> dict[str, Any]:
    """What is run on what, and all settings that are not at their default, by name."""
    data, precision = module.data, module.settings["precision"]
    settings = {
        "method": type(module.method).__name__,
        "lm": data.lm_name,
        "targets": type(data.source).__name__,
        "prompt_length": module.prompt_length,
        "steps": module.steps,
        "seed": module.seed,
        **({} if precision is None else {"precision": precision}),
        **_changed(type(module.method), vars(module.method)),
        **_changed(Inverter, module.hparams),
        **_changed(TargetDataModule, data.hparams),
        **_changed(type(data.source), vars(data.source), "targets."),
        **({} if data.share is None else _changed(type(data.share), vars(data.share), "share.")),
    }
    # As YAML files have it.
    return {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}


def _changed(cls: type, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Arguments of a class that are not at their default; a method's with those of its own."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        value = values.get(name, parameter.default)
        if value == parameter.default:
            continue
        found[prefix + name] = type(value).__name__ if isinstance(value, Method) else value
        if isinstance(value, Method):
            found |= _changed(type(value), vars(value), f"{prefix}{name}.")
    return found


def _slot_markdown(lm: FrozenLM, slot: Slot) -> str:
    """The target, the output with differences in bold brackets, and the prompt, as a table."""
    last, target = slot.last, slot.target
    assert last is not None
    rows = {
        "target": _escaped(lm, target.ids),
        f"output, LCS {last.lcs:.2f}": marked_markdown(lm, target.ids, last.output_ids),
        f"prompt after {counted(last.step, 'step')}": _escaped(lm, last.prompt_ids),
    }
    lines = (f"| {name} | {markdown_code(cell)} |" for name, cell in rows.items())
    return "\n".join(["| what | text |", "|---|---|", *lines])


def _escaped(lm: FrozenLM, ids: Sequence[int]) -> str:
    return escape_markdown("".join(token_texts(lm, ids)))
