"""The folder of a run: where it is to be, and what is left of it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from dlmi.errors import InputError
from dlmi.rows import results_files
from dlmi.run.checkpoints import LAST, find_checkpoints, previous, read_checkpoint
from dlmi.run.workers import slurm

RUNS = "lightning_logs"  # the folder of run folders
HERE = "./"  # where run folders go unless told otherwise; nobody else writes it like this


def choose_folder(config: Namespace, job_settings: str | None) -> None:
    """Set where a run writes: in a new folder, or in that of the run that it goes on with.

    Args:
        config: The settings of `fit`, as parsed.
        job_settings: In a job of SLURM, the same as text: one job may run several commands.
    """
    options: Any = getattr(config.trainer.logger, "init_args", {})
    if config.trainer.default_root_dir is not None and options.get("save_dir") == HERE:
        options.save_dir = str(config.trainer.default_root_dir)
    runs = Path(options.get("save_dir") or HERE) / (options.get("name") or RUNS)
    is_new = options.get("version") is None and not config.ckpt_path
    if (
        job_settings
        and options
        and is_new
        and (earlier := slurm.earlier_folder(runs, job_settings))
    ):
        options.version, config.continue_run = earlier.name, True  # the job was queued again
    if config.ckpt_path == "last":
        config.ckpt_path = _newest_checkpoint(runs)
    if config.continue_run and not config.ckpt_path:
        config.ckpt_path = _last_checkpoint(runs, options.get("version"))
    run = None
    if config.ckpt_path:
        config.continue_run = True
        _check_checkpoint(Path(config.ckpt_path))
        if Path(config.ckpt_path).parent.name == "checkpoints":
            run = Path(config.ckpt_path).resolve().parents[1]
    if run is not None and options:
        if Path(options.get("save_dir") or HERE).resolve() != run.parent.parent:
            options.save_dir = str(run.parent.parent)  # else as it was: callbacks compare its text
        options.name, options.version = run.parent.name, run.name
    elif not config.trainer.logger and config.trainer.default_root_dir is None:
        # A logger names the folder of a run; where there is none, its files would lie about.
        config.trainer.default_root_dir = str(run or _next_folder(runs))


def _next_folder(runs: Path) -> Path:
    """Where the next run goes, by the count of Lightning's loggers."""
    counts = [path.name.removeprefix("version_") for path in runs.glob("version_*")]
    return (
        runs / f"version_{max((int(count) for count in counts if count.isdigit()), default=-1) + 1}"
    )


def _newest_checkpoint(runs: Path) -> str:
    """That of the run below a folder that was saved last."""
    found = sorted(runs.glob(f"**/checkpoints/{LAST}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(
            f"Expected a run with a checkpoint below {runs} for `ckpt_path` last, but there is "
            "none: a run that is done keeps none. Leave it out, or give the checkpoint's file."
        )
    return str(found[-1])


def _last_checkpoint(runs: Path, version: str | int | None) -> str | None:
    """The checkpoint of a run folder, where there is one."""
    if version is None:
        raise InputError(
            "Expected `continue_run` to come with the run's folder, but it is not named. Give its "
            "`--trainer.logger.init_args.version`, or resume with `--ckpt_path`."
        )
    folder = version if isinstance(version, str) else f"version_{version}"
    found = find_checkpoints(runs / folder / "checkpoints")
    return str(found[0]) if found else None  # that of any worker will do


def _check_checkpoint(path: Path) -> None:
    if not (path.is_file() or previous(path).is_file()):
        raise InputError(
            f"Expected `ckpt_path` to be a checkpoint file, but '{path}' is not one. They lie in "
            "`lightning_logs/version_*/checkpoints`."
        )
    read_checkpoint(path, mmap=True)


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
