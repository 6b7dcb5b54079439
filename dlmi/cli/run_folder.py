"""Chooses the folder of a run."""

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from dlmi.errors import InputError
from dlmi.rows import results_files
from dlmi.run.checkpoints import LAST, find_checkpoints, read_checkpoint
from dlmi.run.workers import slurm

RUNS = "lightning_logs"  # the folder of run folders
HERE = "./"  # the default; a user would write "."


def choose_folder(config: Namespace, job_settings: str | None) -> None:
    """Set where a run writes: into a new folder, or into that of the run that it continues.

    `job_settings` are the settings as text, in a SLURM job: it may run several commands.
    """
    options: Any = getattr(config.trainer.logger, "init_args", {})
    if config.trainer.default_root_dir is not None and options.get("save_dir") == HERE:
        options.save_dir = str(config.trainer.default_root_dir)
    runs = Path(options.get("save_dir") or HERE) / (options.get("name") or RUNS)
    is_new = options.get("version") is None and not config.ckpt_path
    earlier = slurm.earlier_folder(runs, job_settings) if job_settings else None
    if earlier and options and is_new:  # the job was queued again
        options.version, config.continue_run = earlier.name, True
    if config.ckpt_path == "last":
        config.ckpt_path = _newest_checkpoint(runs)
    if config.continue_run and not config.ckpt_path:
        config.ckpt_path = _last_checkpoint(runs, options.get("version"))
    run = None
    if config.ckpt_path:
        config.continue_run = True
        path = Path(config.ckpt_path)
        read_checkpoint(path, mmap=True)  # checked before the LM is loaded
        if path.parent.name == "checkpoints":
            run = path.resolve().parents[1]
    if run is not None and options:
        if Path(options.get("save_dir") or HERE).resolve() != run.parent.parent:
            options.save_dir = str(run.parent.parent)  # unchanged otherwise: its text is compared
        options.name, options.version = run.parent.name, run.name
    elif not config.trainer.logger and config.trainer.default_root_dir is None:
        # Without a logger nothing else names a folder for the run.
        numbered = (runs / f"version_{number}" for number in itertools.count())
        new = next(path for path in numbered if not path.exists())
        config.trainer.default_root_dir = str(run or new)


def _newest_checkpoint(runs: Path) -> str:
    """The checkpoint below a folder that was saved last."""
    found = sorted(runs.glob(f"**/checkpoints/{LAST}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(
            f"Expected a run with a checkpoint below {runs} for `ckpt_path` last, but there is "
            "none: a finished run has none. Leave it out, or give the checkpoint's file."
        )
    return str(found[-1])


def _last_checkpoint(runs: Path, version: str | int | None) -> str | None:
    """The checkpoint of a run folder, if it has one."""
    if version is None:
        raise InputError(
            "Expected `continue_run` with the run's folder, but got none. Give its "
            "`--trainer.logger.init_args.version`, or resume with `--ckpt_path`."
        )
    folder = version if isinstance(version, str) else f"version_{version}"
    found = find_checkpoints(runs / folder / "checkpoints")
    return str(found[0]) if found else None  # of any worker


@contextlib.contextmanager
def removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove the folder of a new run if its settings are refused after it was made."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except InputError:
        if folder in new and not results_files(folder):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # from the first that is not empty
            for parent in new[1:]:
                parent.rmdir()
        raise
