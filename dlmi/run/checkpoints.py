"""Checkpoints, whole or not there: written aside, synced, renamed; the one before is kept."""

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint

from dlmi.errors import InputError, RunStopped

LAST = "last.ckpt"


class _Inversion(TypedDict):
    identity: dict[str, Any]
    slots: list[dict[str, Any]]
    finished_ids: list[str]


class _Checkpoint(TypedDict):
    """What Lightning and the inverter take from a checkpoint."""

    epoch: int
    global_step: int
    loops: dict[str, Any]
    state_dict: dict[str, Any]
    inversion: _Inversion


def checkpoint_name(worker: int) -> str:
    """Name of a worker's file in the folder `checkpoints` of a run."""
    return f"last.worker{worker}.ckpt" if worker else LAST


def previous(path: Path) -> Path:
    """Where the checkpoint before the last one is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def find_checkpoints(folder: Path) -> list[Path]:
    """The file of each worker in a folder of checkpoints, worker 0 first."""
    names = {p.name.replace(".previous.ckpt", ".ckpt") for p in folder.glob("last*.ckpt")}
    return sorted((folder / name for name in names), key=lambda p: (p.name != LAST, p.name))


def read_checkpoint(path: Path, mmap: bool = False) -> dict[str, Any]:
    """A checkpoint, or the one before it if it was cut short; data only, no code is run.

    Args:
        path: The file.
        mmap: Read tensors from the file when they are used.

    Raises:
        InputError: If neither can be read.
    """
    problem: Exception | None = None
    for candidate in (path, previous(path)):
        try:
            found = torch.load(candidate, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # torch raises whatever a broken file makes it raise
            problem = problem or error
            continue
        if candidate != path:
            rank_zero_warn(f"{path} cannot be read; the checkpoint before it is used.")
        if not isinstance(found, dict):
            break
        return found
    reason = f" ({str(problem).splitlines()[0][:200]})" if problem and str(problem) else ""
    if isinstance(problem, pickle.UnpicklingError):  # torch would advise to run what is in it
        reason = ": it holds more than data, which could run code, so it was not read"
    raise InputError(
        f"Expected `ckpt_path` to be a whole checkpoint of dlmi, but {path} is not one{reason}. "
        "Give another, or delete it: `--continue_run true` keeps the rows of the run's folder."
    )


def check_checkpoint_file(path: Path) -> None:
    """Raise `InputError` unless a file, or the one before it if it was cut, is one of dlmi's."""
    checkpoint = read_checkpoint(path, mmap=True)
    try:
        migrate_checkpoint(checkpoint)  # as Lightning will, if the version is one
        msgspec.convert(checkpoint, _Checkpoint)
    except Exception as error:  # of whatever does not fit
        raise InputError(
            f"Expected `ckpt_path` to be a checkpoint of dlmi, but {path} is that of another "
            f"program, or broken ({error})."
        ) from error


class AtomicCheckpoints(TorchCheckpointIO):
    """Lightning's way to write and read checkpoints, without half ones."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write it beside its place, sync it, and put it there in one step."""
        path = Path(path)
        scratch = path.with_name(f"{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            _keep(path)
            scratch.replace(path)
            _sync(path.parent)
        except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise RunStopped(
                f"the checkpoint {path} could not be written ({error.__cause__ or error}). The one "
                "before it and all finished rows are whole: make room, then resume."
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, or the one before it."""
        return read_checkpoint(Path(path))


def _keep(path: Path) -> None:
    """Let the last checkpoint be the one before; its own name stays in place throughout."""
    if not path.exists():
        return
    kept = previous(path)
    kept.unlink(missing_ok=True)
    try:
        os.link(path, kept)
    except OSError:  # a file system without hard links
        path.replace(kept)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
