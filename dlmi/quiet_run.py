"""A run with no files and no screen."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence

from lightning.pytorch import Callback, Trainer

from dlmi.data import TargetDataModule
from dlmi.inverter import Inverter

_ADVICE = (
    ".*does not have many workers.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
)


def run_quietly(
    module: Inverter, data: TargetDataModule, callbacks: Sequence[Callback] = ()
) -> None:
    """`Trainer.fit` with no files and no screen."""
    with _silent_lightning():
        trainer = Trainer(
            max_epochs=-1,
            accelerator="cpu" if data.lm.device.type == "cpu" else "auto",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        trainer.fit(module, datamodule=data)


@contextlib.contextmanager
def _silent_lightning() -> Iterator[None]:
    """Keep advice off the screen that does not concern whoever called."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _ADVICE:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.setLevel(level)
