"""Checkpoint files: written in full before they replace the last one, which is kept as well."""

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

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
    """What Lightning and the inverter read from a checkpoint."""

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


@contextlib.contextmanager
def broken_is_input_error(what: str) -> Iterator[None]:
    """Turn every error into an `InputError`: a broken file can raise anything, anywhere."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        if isinstance(error, pickle.UnpicklingError):  # torch would advise to run what is in it
            reason = "it holds more than data, which could run code, so it was not read"
        raise InputError(
            f"Expected `ckpt_path` to be a whole checkpoint of dlmi, but {what} is not ({reason}). "
            "Give another, or delete it: `--continue_run true` keeps the rows of the run's folder."
        ) from error


def read_checkpoint(path: Path, mmap: bool = False) -> dict[str, Any]:
    """A checkpoint of dlmi, or the one before it if it was cut short; no code is run.

    With `mmap`, tensors are read when they are used. `InputError` where it is neither.
    """
    options: Any = {"map_location": "cpu", "weights_only": True, "mmap": mmap}
    with broken_is_input_error(str(path)):
        try:
            found: dict[str, Any] = torch.load(path, **options)
        except Exception:  # torch raises whatever a broken file makes it raise
            if not previous(path).is_file():
                raise
            found = torch.load(previous(path), **options)
            rank_zero_warn(f"{path} cannot be read; the checkpoint before it is used.")
        if "inversion" not in found:
            raise ValueError("it is that of another program")
        migrate_checkpoint(found)  # as Lightning will
        msgspec.convert(found, _Checkpoint)
        return found


class AtomicCheckpoints(TorchCheckpointIO):
    """Lightning's way to write and read checkpoints, without half-written files."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write beside the last checkpoint, sync, then replace it in one step."""
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
