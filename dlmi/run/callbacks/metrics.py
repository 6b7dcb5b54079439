"""What TensorBoard shows beside the loss: honest LCS, temperatures, gradients, the text itself."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from dlmi.methods.slot import Slot
from dlmi.metrics import lcs_ratio
from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.inverter import Inverter
from dlmi.text import escape_markdown, marked_markdown, token_texts


class LCSRatio(MeanMetric):
    """Mean LCS ratio.

    >>> metric = LCSRatio()
    >>> metric.update([1, 2, 3, 4], [1, 2, 3, 4])
    >>> metric.update([1, 2, 3, 4], [2, 4, 3])
    >>> metric.compute()
    tensor(0.7500)
    """

    def update(self, target_ids: Sequence[int], output_ids: Sequence[int]) -> None:  # type: ignore[override]
        """Add one target and what was said."""
        super().update(lcs_ratio(target_ids, output_ids))


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
        self._lcs = LCSRatio()
        self._exact = MeanMetric()
        self._overlap = MeanMetric()
        # Of logarithms: perplexities of random tokens span orders of magnitude.
        self._log_perplexity = MeanMetric()
        self._counted = 0

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
        board = _board(trainer)
        if board is None:
            return
        step = trainer.global_step
        for name, values in _scalars(slots).items():
            if values:
                board.add_scalar(f"eval/{name}", sum(values) / len(values), step)
        # Over all targets begun: if those that are done did not count, success would lower it.
        best = [row.lcs for row in module.finished]
        best += [slot.best.lcs for slot in module.active if slot.best is not None]
        cost = sum(slot.cost.total for slot in slots) // len(slots)
        board.add_scalar("eval/best_lcs", sum(best) / len(best), step)
        board.add_scalar("cost/best_lcs", sum(best) / len(best), cost)
        diagnostics = [slot.diagnostics for slot in slots]
        for name in diagnostics[0]:
            positions = torch.cat([d[name].detach().float().flatten() for d in diagnostics])
            board.add_scalar(f"eval/{name}", float(positions.mean()), step)
            board.add_histogram(f"{name}_per_position", positions.cpu(), step)
        if self._evaluations % self.text_every == 0:
            for slot in slots:
                board.add_text(f"slot {slot.index}", _slot_markdown(module, slot), step)
        self._evaluations += 1

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Running means over the finished targets, those before a resume included."""
        for done in module.finished[self._counted :]:
            self._counted += 1
            self._lcs.update(done.target_ids, done.output_ids)
            self._exact.update(float(done.exact))
            self._overlap.update(done.overlap_ratio)
            if done.prompt_perplexity is not None:
                self._log_perplexity.update(math.log(done.prompt_perplexity))
        if board := _board(trainer):
            count = self._counted
            board.add_scalar("finished/mean_lcs", float(self._lcs.compute()), count)
            board.add_scalar("finished/exact_rate", float(self._exact.compute()), count)
            board.add_scalar("finished/mean_overlap", float(self._overlap.compute()), count)
            if self._log_perplexity.update_called:
                mean = math.exp(self._log_perplexity.compute())
                board.add_scalar("finished/mean_prompt_perplexity", mean, count)
            board.add_scalar("finished/lcs", row.lcs, count)
            board.add_scalar("finished/steps", row.steps, count)

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Hyperparameters with the final metrics."""
        rows, logger = pl_module.finished, trainer.logger
        if not rows or not isinstance(logger, TensorBoardLogger):
            return
        metrics = {
            "final/mean_lcs": sum(row.lcs for row in rows) / len(rows),
            "final/exact_rate": sum(row.exact for row in rows) / len(rows),
            "final/mean_steps": sum(row.steps for row in rows) / len(rows),
        }
        logger.log_hyperparams(_hyperparameters(pl_module), metrics)
        logger.save()


def _hyperparameters(module: Inverter) -> dict[str, Any]:
    """Settings of the method, of the run and of its data, by name."""
    data = module.data
    settings = {"method": type(module.method).__name__, **module.settings, **data.hparams}
    parts = {"targets": data.source, "load": data.load_options, "share": data.share}
    for name, part in parts.items():
        if part is not None:
            settings[name] = type(part).__name__
            settings |= {f"{name}.{key}": _plain(value) for key, value in vars(part).items()}
    return {name: value for name, value in settings.items() if not name.startswith("_")}


def _plain(value: Any) -> Any:
    """A value as YAML files have it."""
    return list(value) if isinstance(value, tuple) else value


def _board(trainer: Trainer) -> Any:
    """The SummaryWriter of a TensorBoard logger, or None."""
    logger = trainer.logger
    return logger.experiment if isinstance(logger, TensorBoardLogger) else None


def _scalars(slots: list[Slot]) -> dict[str, list[float]]:
    """Numbers of each slot's latest evaluation, by name; what a slot lacks is left out."""
    latest = [slot.last for slot in slots if slot.last is not None]
    return {
        "lcs": [e.lcs for e in latest],
        "as_in_code_lcs": [e.as_in_code_lcs for e in latest if e.as_in_code_lcs is not None],
        "discrete_loss": [e.discrete_loss for e in latest],
        "token_passes": [float(slot.cost.total) for slot in slots],
        "soft_to_hard_gap": [e.discrete_loss - e.loss for e in latest if e.loss is not None],
    }


def _slot_markdown(module: Inverter, slot: Slot) -> str:
    """The target, the output with differences in bold brackets, and the prompt, as a table."""
    evaluation = slot.last
    assert evaluation is not None
    target_ids = slot.target.ids
    rows = {
        f"target {escape_markdown(slot.target.id)}": escape_markdown(
            "".join(token_texts(module.lm, target_ids))
        ),
        f"output, LCS {evaluation.lcs:.2f}": marked_markdown(
            module.lm, target_ids, evaluation.output_ids
        ),
        f"prompt after {evaluation.step} steps": escape_markdown(
            "".join(token_texts(module.lm, evaluation.prompt_ids))
        ),
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {k} | {v} |" for k, v in rows.items())
