"""The numbers of a run for Lightning's callbacks and loggers."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from dlmi.errors import InputError
from dlmi.methods.slot import Slot
from dlmi.rows import Inversion


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
        for name, positions in slot.diagnostics.items():
            values.setdefault(name, []).extend(positions.float().flatten().tolist())
    return {f"eval/{name}": fmean(found) for name, found in values.items() if found}


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
        logger.log_metrics({n: float(v) for n, v in scalars.items()}, trainer.global_step)


def check_early_stopping(trainer: Trainer, module: LightningModule) -> None:
    """Let `EarlyStopping` look at an evaluation, which is what Lightning calls a validation.

    Raises:
        InputError: If it monitors what is never measured.
    """
    measured = trainer.callback_metrics
    for callback in trainer.early_stopping_callbacks:
        if callback is None or (callback.monitor not in measured and "train/loss" not in measured):
            continue  # before the first step not all metrics are known
        if callback.monitor not in measured and callback.strict:
            raise InputError(
                f"Expected EarlyStopping to monitor one of {', '.join(sorted(measured))}, but got "
                f"{callback.monitor}."
            )
        # Otherwise it would look at the end of the only epoch, which is the end of the run.
        callback._check_on_train_epoch_end = False
        callback.on_validation_end(trainer, module)
