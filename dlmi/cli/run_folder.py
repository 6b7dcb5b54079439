"""The folder of a run: where it is to be, whether it may be used, what is left of it."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlmi.errors import InputError
from dlmi.rows import results_files
from dlmi.run.checkpoints import find_checkpoints, previous, read_checkpoint

HERE = "./"  # where run folders go unless told otherwise; nobody else writes it like this


def follow_root(trainer: Any) -> None:
    """Let `trainer.default_root_dir` decide where the logger of a run writes.

    Args:
        trainer: Settings of the trainer, as parsed.
    """
    options = getattr(trainer.logger, "init_args", None)
    if trainer.default_root_dir is not None and options and options.get("save_dir") == HERE:
        options.save_dir = str(trainer.default_root_dir)


def last_checkpoint(logger: Any) -> str | None:
    """The checkpoint of the run folder that a logger's settings name, where there is one."""
    options = getattr(logger, "init_args", None)
    if options is None or options.get("version") is None:
        raise InputError(
            "Expected `continue_run` to come with the run's folder, but it is not named. Give its "
            "`--trainer.logger.init_args.version`, or resume with `--ckpt_path`."
        )
    version = options.version
    folder = version if isinstance(version, str) else f"version_{version}"
    found = find_checkpoints(Path(options.save_dir) / (options.name or "") / folder / "checkpoints")
    return str(found[0]) if found else None  # that of any worker will do


def follow_checkpoint(path: str, logger: Any) -> None:
    """Send a resumed run to the folder that its checkpoint lies in.

    Args:
        path: The checkpoint.
        logger: Settings of the logger, as parsed.
    """
    checkpoint = Path(path)
    if not (checkpoint.is_file() or previous(checkpoint).is_file()):
        raise InputError(
            f"Expected `ckpt_path` to be a checkpoint file, but {path!r} is not one. They lie in "
            "`lightning_logs/version_*/checkpoints`."
        )
    read_checkpoint(checkpoint, mmap=True)
    run = checkpoint.resolve().parents[1]
    if checkpoint.parent.name == "checkpoints" and hasattr(logger, "init_args"):
        logger.init_args.save_dir = str(run.parent.parent)
        logger.init_args.name = run.parent.name
        logger.init_args.version = run.name


def check_writable(folder: Path) -> None:
    """Raise `InputError` unless a run can write to a folder, or make it."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(
            f"Expected a run folder that can be written, but {folder} cannot ({existing} is "
            f"{'read-only' if existing.is_dir() else 'a file'}). "
            "Choose another with `--trainer.default_root_dir`."
        )


@contextlib.contextmanager
def removed_if_refused(folder: Path) -> Iterator[None]:
    """Leave nothing behind where settings are refused once the folder of a new run is made."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except InputError:
        if folder in missing and not results_files(folder):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in missing[1:]:
                with contextlib.suppress(OSError):
                    parent.rmdir()  # only where it is empty
        raise
