"""Checkpoints, whole or not there: written aside, synced, renamed; the one before is kept."""

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any, TypedDict, cast

import msgspec
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint

from dlmi.errors import InputError, RunStopped, first_line
from dlmi.lm.pass_dtype import PassDType

LAST = "last.ckpt"


class _Inversion(TypedDict):
    identity: dict[str, Any]
    pass_dtype: PassDType | None
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
    """A checkpoint of dlmi, or the one before it if it was cut short; no code is run.

    With `mmap`, tensors are read when they are used. `InputError` where it is neither.
    """
    problem = ""
    for candidate in (path, previous(path)):
        try:
            found = torch.load(candidate, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # torch raises whatever a broken file makes it raise
            reason = first_line(error)[:200]
            if isinstance(error, pickle.UnpicklingError):  # torch would advise to run what is in it
                reason = "it holds more than data, which could run code, so it was not read"
            problem = problem or reason
            continue
        if candidate != path:
            rank_zero_warn(f"{path} cannot be read; the checkpoint before it is used.")
        try:
            migrate_checkpoint(found)  # as Lightning will, if the version is one
            msgspec.convert(found, _Checkpoint)
        except Exception as error:  # of whatever does not fit
            problem = f"it is that of another program, or broken ({error})"
            break
        return cast(dict[str, Any], found)
    raise InputError(
        f"Expected `ckpt_path` to be a whole checkpoint of dlmi, but {path} is not: {problem}. "
        "Give another, or delete it: `--continue_run true` keeps the rows of the run's folder."
    )


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
            if path.exists():
                previous(path).unlink(missing_ok=True)
                try:
                    os.link(path, previous(path))  # its own name stays in place throughout
                except OSError:  # a file system without hard links
                    path.replace(previous(path))
            scratch.replace(path)
            handle = os.open(path.parent, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
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
