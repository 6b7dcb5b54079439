"""The numbers of a run for Lightning's callbacks and loggers."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from dlmi.errors import InputError
from dlmi.methods.slot import Slot
from dlmi.rows import Inversion

# What a ModelCheckpoint may monitor that is not measured at each evaluation.
_LATER = ("finished/", "train/grad_norm_", "step", "epoch")


def evaluation_scalars(
    decoded: Sequence[Slot], active: Sequence[Slot], finished: Sequence[Inversion]
) -> dict[str, float]:
    """Means over the slots just decoded; `eval/best_lcs` is over all targets begun.

    Without finished targets, `eval/best_lcs` would fall whenever a target is solved.
    """
    latest = [slot.last for slot in decoded if slot.last is not None]
    values: dict[str, list[float]] = {
        "lcs": [e.lcs for e in latest],
        "as_in_code_lcs": [e.as_in_code_lcs for e in latest if e.as_in_code_lcs is not None],
        "discrete_loss": [e.discrete_loss for e in latest],
        "token_passes": [slot.cost.total for slot in decoded],
        "soft_to_hard_gap": [e.discrete_loss - e.loss for e in latest if e.loss is not None],
        "best_lcs": [row.lcs for row in finished]
        + [slot.best.lcs for slot in active if slot.best is not None],
    }
    for slot in decoded:
        for name, positions in relaxed_diagnostics(slot).items():
            values.setdefault(name, []).extend(positions.float().flatten().tolist())
    return {f"eval/{name}": fmean(found) for name, found in values.items() if found}


def relaxed_diagnostics(slot: Slot) -> dict[str, Tensor]:
    """Diagnostics of a relaxed prompt, (N,) each; none once `Refined` searches from it."""
    is_searching = getattr(slot.state, "search", None) is not None
    return {} if is_searching else slot.diagnostics


def is_log_step(trainer: Trainer) -> bool:
    """Whether loggers get the numbers of this step, by `log_every_n_steps`."""
    every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return (trainer.global_step + 1) % every_n_steps == 0


def publish(
    module: LightningModule, scalars: Mapping[str, float | Tensor], to_loggers: bool = True
) -> None:
    """Give scalars to callbacks and to all loggers, at the step of the run.

    `LightningModule.log` alone would give loggers an evaluation at a later step, never the last
    one, and a chart of the epoch, which is always 0.
    """
    # Lightning would copy each number to the device.
    values = {name: torch.as_tensor(value) for name, value in scalars.items()}
    module.log_dict(values, logger=False, batch_size=1)
    trainer = module.trainer
    if to_loggers:
        assert trainer.callback_metrics is not None  # reading it updates it
    for logger in trainer.loggers if to_loggers else ():
        log_scalars(logger, {n: float(v) for n, v in scalars.items()}, trainer.global_step)


@rank_zero_only
def log_scalars(logger: Logger, scalars: dict[str, float], step: int) -> None:
    """Give scalars to one logger; a CSV file has one line for those of the same step."""
    logger.log_metrics(scalars, step)
    lines = logger.experiment.metrics if isinstance(logger, CSVLogger) else []
    if len(lines) > 1 and lines[-1].items() & lines[-2].items() == {("step", step)}:
        last = lines.pop()
        lines[-1] |= last


def check_early_stopping(trainer: Trainer, module: LightningModule) -> None:
    """Let `EarlyStopping` look at an evaluation, which is what Lightning calls a validation.

    Raises:
        InputError: If it, or a `ModelCheckpoint`, monitors what is never measured.
    """
    measured = trainer.callback_metrics
    if "train/loss" in measured:  # before the first step not all metrics are known
        for checkpoint in trainer.checkpoint_callbacks:
            monitor = getattr(checkpoint, "monitor", None)
            if monitor and not monitor.startswith(_LATER):
                _check_monitor("ModelCheckpoint", monitor, measured)
    for callback in trainer.early_stopping_callbacks:
        if callback is None or (callback.monitor not in measured and "train/loss" not in measured):
            continue
        if callback.strict:
            _check_monitor("EarlyStopping", callback.monitor, measured)
        # Otherwise it would look at the end of the only epoch, which is the end of the run.
        callback._check_on_train_epoch_end = False
        callback.on_validation_end(trainer, module)


def _check_monitor(callback: str, monitor: str, measured: Collection[str]) -> None:
    if monitor not in measured:
        raise InputError(
            f"Expected {callback} to monitor one of {', '.join(sorted(measured))}, but got "
            f"{monitor}."
        )
