"""The folder of a run, whatever logger it has."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def run_folder(trainer: Trainer) -> Path:
    """Where a run writes its rows, its config and its checkpoints.

    It is the folder of the first logger; for a logger without one, such as W&B's, a folder by
    project and version, as Lightning's checkpoints have; without a logger `default_root_dir`.
    """
    root = Path(trainer.default_root_dir)
    if not trainer.loggers or is_trial(trainer):
        return root
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(trainer.log_dir or root)
    _ = getattr(logger, "experiment", None)  # some loggers make their version with it
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    folder = Path(logger.save_dir or root) / str(logger.name) / version
    return Path(trainer.strategy.broadcast(str(folder)))


def is_trial(trainer: Trainer) -> bool:
    """Whether it is a `fast_dev_run`, which leaves no file behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
