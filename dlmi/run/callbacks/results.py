"""Writes `results.jsonl`: every finished row is on the disk before its slot is reused.

Each worker appends to a file of its own, and `read_rows` of the folder reads them all. The worker
that ends last merges them.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout
from lightning.pytorch import LightningModule, Trainer

from dlmi.errors import InputError
from dlmi.jsonl import append_line, parse_object, rewrite_lines
from dlmi.rows import RESULTS_FILE, Inversion, read_rows, results_files, results_name
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.folder import is_trial, run_folder
from dlmi.run.identity import check_row
from dlmi.run.inverter import Inverter

_LOCK = ".lock"
_ORPHANS_END_WITHIN = 60.0  # seconds: a step and a checkpoint
_LOOK_EVERY = 1.0  # seconds between two looks at other workers' files


def lock_folder(folder: Path, name: str = _LOCK, wait: float = 0.0) -> AcquireReturnProxy[FileLock]:
    """Lock a folder until the context ends, its `lock` is released or this process ends.

    `InputError` if another process has the lock after `wait` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / name, thread_local=False).acquire(timeout=wait)
    except Timeout as error:
        raise InputError(
            f"Expected a folder of its own, but another process is writing to {folder}. Wait for "
            "it to end, or choose another folder."
        ) from error


def refuse_used_folder(folder: Path) -> None:
    """Raise `InputError` if a run has already written its results there."""
    if results_files(folder):
        raise InputError(
            f"Expected a fresh run folder, but {folder} holds the results of a run. Resume that "
            "run with `--ckpt_path`, or choose another folder."
        )


class ResultWriter(InversionCallback):
    """One JSON line per target in the run's folder.

    When a run goes on, the rows that are there count as finished, even those written after the
    checkpoint; only rows of interrupted targets, which go on now, are taken out.

    Attributes:
        path: This worker's file.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._lock: FileLock | None = None
        self._read: dict[Path, int] = {}  # bytes of other workers' files, on worker 0
        self._looked = 0.0

    def claim(self, folder: Path, worker: int = 0) -> None:
        """Lock the folder for this worker, unless it is locked already."""
        if self._lock is None or not self._lock.is_locked:
            name = f"{_LOCK}.worker{worker}" if worker else _LOCK
            self._lock = lock_folder(folder, name).lock

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """On worker 0, while the others wait: let workers of an earlier part of the run end."""
        folder = run_folder(trainer)
        if trainer.is_global_zero and not is_trial(trainer):
            self.claim(folder)
            for path in folder.glob(f"{_LOCK}.worker*"):
                lock_folder(folder, path.name, _ORPHANS_END_WITHIN).lock.release()

    def on_train_start(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Find the file; on worker 0, keep what an earlier part of this run finished."""
        if is_trial(trainer):
            return
        folder, worker = pl_module.folder, pl_module.workers.index
        self.path = folder / results_name(worker)
        self._read = {}
        self.claim(folder, worker)
        if worker == 0 and results_files(folder):
            if trainer.ckpt_path is None and not self.continues:
                refuse_used_folder(folder)
            rows = read_rows(folder, tolerate_cut=True)
            for row in rows:
                check_row(row, pl_module.identity)
            pl_module.finished += [row for row in rows if row.stop_reason != "interrupted"]
            _merge(folder, pl_module.finished)

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Append the row and sync it to the disk."""
        if self.path is not None:
            append_line(self.path, row.to_json_line())

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: Trainer, pl_module: Inverter, batch: Any, batch_idx: int
    ) -> None:
        """On worker 0: read what the others have finished."""
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._read_others(pl_module)
            self._looked = time.monotonic()

    def _read_others(self, module: Inverter) -> None:
        if module.workers.size == 1 or module.workers.index:
            return
        for path in results_files(module.folder):
            if path == self.path:
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if line.endswith(b"\n"):  # the last may be half written
                        module.finished.append(Inversion.from_json(parse_object(line)))
                        self._read[path] = self._read.get(path, 0) + len(line)

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Unlock the folder; merge the files of all workers if this is the last."""
        if self.path is not None:
            self._read_others(pl_module)
        self._unlock()
        if self.path is not None and pl_module.workers.size > 1:
            merge_if_last(pl_module.folder)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Unlock the folder: Lightning calls no `teardown` after an error."""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()


def merge_if_last(folder: Path) -> None:
    """Merge unless a worker is at work; one process at a time, or the last two could both skip."""
    with FileLock(folder / f"{_LOCK}.merge"), contextlib.ExitStack() as stack:
        try:
            for path in [folder / _LOCK, *folder.glob(f"{_LOCK}.worker*")]:
                stack.enter_context(FileLock(path).acquire(timeout=0))
        except Timeout:
            return
        if results_files(folder):
            _merge(folder, read_rows(folder, tolerate_cut=True))


def _merge(folder: Path, rows: list[Inversion]) -> None:
    """Write these rows to worker 0's file, then remove the files of the others."""
    rewrite_lines(folder / RESULTS_FILE, (row.to_json_line() for row in rows))
    for file in results_files(folder):
        if file.name != RESULTS_FILE:
            file.unlink()
