"""Writes `results.jsonl`: every finished row is on the disk before its slot is reused."""

from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout
from lightning.pytorch import LightningModule, Trainer

from dlmi.errors import InputError
from dlmi.jsonl import append_line
from dlmi.rows import (
    RESULTS_FILE,
    Inversion,
    read_rows,
    results_files,
    results_name,
    rewrite_rows,
)
from dlmi.run.callbacks.base import InversionCallback, InversionRun
from dlmi.run.inverter import Inverter

_ORPHANS_END_WITHIN = 60.0  # seconds: a step and a checkpoint


def lock_folder(folder: Path, rank: int = 0, patience: float = 0.0) -> AcquireReturnProxy[FileLock]:
    """Keep other processes out of a folder; the system lets go when this one ends.

    Args:
        folder: Made if it is not there.
        rank: Workers of a run have a lock each.
        patience: Seconds to wait for a process that is on its way out.

    Returns:
        What holds the lock, until its context ends or its `lock` is released.

    Raises:
        InputError: If another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / (f".lock.rank{rank}" if rank else ".lock"), thread_local=False)
    try:
        return lock.acquire(timeout=patience)
    except Timeout as error:
        raise InputError(
            f"Expected a folder of its own, but another process is writing to {folder}. Wait for "
            "it to end, or choose another folder."
        ) from error


def wait_for_other_workers(folder: Path, patience: float) -> None:
    """Wait until no worker of an earlier part of the run writes to a folder any more.

    When worker 0 is killed, the others notice within a second or two, save, and end.

    Raises:
        InputError: If one is still there after `patience` seconds.
    """
    for path in folder.glob(".lock.rank*"):
        rank = path.name.removeprefix(".lock.rank")
        if rank.isdigit():
            lock_folder(folder, int(rank), patience).lock.release()


def refuse_used_folder(folder: Path) -> None:
    """Raise `InputError` if a run has already written its results there."""
    if results_files(folder):
        raise InputError(
            f"Expected a fresh run folder, but {folder} holds the results of a run. Resume that "
            "run with `--ckpt_path`, or choose another folder."
        )


class ResultWriter(InversionCallback):
    """One JSON line per target in the run's folder.

    Each worker has a file of its own; worker 0 merges them when all are done. When a run goes on,
    the rows that are there count as finished, even those written after the checkpoint; only rows
    of interrupted targets, which go on now, are taken out.

    Attributes:
        path: This worker's file.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._earlier_rows: list[Inversion] = []
        self._lock: AcquireReturnProxy[FileLock] | None = None

    def claim(self, folder: Path, rank: int = 0) -> None:
        """Keep others out of a folder, from now on; once is enough."""
        if self._lock is None:
            self._lock = lock_folder(folder, rank)

    def on_train_start(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Find the file; on worker 0, keep what an earlier part of this run finished."""
        folder, rank = pl_module.folder, pl_module.ranks.rank
        self.path = folder / results_name(rank)
        if rank == 0:
            self.claim(folder)
            wait_for_other_workers(folder, _ORPHANS_END_WITHIN)
            self._take_over(trainer, pl_module)
        pl_module.ranks.barrier()
        self.claim(folder, rank)

    def _take_over(self, trainer: Trainer, module: InversionRun) -> None:
        if not results_files(module.folder):
            return
        if trainer.ckpt_path is None and not self.continues:
            refuse_used_folder(module.folder)
        rows = read_rows(module.folder, tolerate_cut=True)
        for row in rows:
            module.check_same_run(row)
        self._earlier_rows = [row for row in rows if row.stop_reason != "interrupted"]
        _merge(module.folder, self._earlier_rows)

    def earlier_rows(self) -> list[Inversion]:
        """The rows that are in the file from an earlier part of this run."""
        return self._earlier_rows

    def on_target_end(self, trainer: Trainer, module: InversionRun, row: Inversion) -> None:
        """Append the row and sync it to the disk."""
        if self.path is not None:
            append_line(self.path, row.to_json_line())

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Merge the files of all workers; let others have the folder."""
        ranks = pl_module.ranks
        is_whole = ranks.rank == 0 and ranks.trouble is None and ranks.others_have_left
        if self.path is not None and is_whole and len(results_files(pl_module.folder)) > 1:
            _merge(pl_module.folder, pl_module.finished)
        self._unlock()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Only the latter: Lightning tears nothing down after an error."""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.lock.release()
            self._lock = None


def _merge(folder: Path, rows: list[Inversion]) -> None:
    """All rows in worker 0's file; those of the others go when it is on the disk."""
    rewrite_rows(folder / RESULTS_FILE, rows)
    for file in results_files(folder):
        if file.name != RESULTS_FILE:
            file.unlink()
