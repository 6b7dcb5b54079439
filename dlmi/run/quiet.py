"""A run without files and without output on the screen."""

import logging
import warnings
from collections.abc import Sequence
from datetime import timedelta

from lightning.pytorch import Callback, Trainer

from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter

_ADVICE = (
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*`LightningModule.configure_optimizers` returned `None`.*",  # a search has no optimiser
)


def run_quietly(
    module: Inverter,
    data: TargetDataModule,
    callbacks: Sequence[Callback] = (),
    max_time: timedelta | None = None,
) -> None:
    """`Trainer.fit` without files or output; after `max_time` only the first step is taken."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _ADVICE:
                warnings.filterwarnings("ignore", message=message)
            trainer = Trainer(
                max_epochs=-1,
                max_time=None if max_time is None else max(max_time, timedelta.resolution),
                accelerator="cpu" if data.lm.device.type == "cpu" else "auto",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=list(callbacks),
            )
            trainer.fit(module, datamodule=data)
    finally:
        logger.setLevel(level)
