"""Writes `results.jsonl`: every finished row is on the disk before its slot is reused."""

from pathlib import Path
from typing import IO, TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer

from dlmi.callbacks.base import InversionCallback
from dlmi.errors import InputError
from dlmi.locks import lock_folder, wait_for_other_ranks
from dlmi.results import (
    RESULTS_FILE,
    Inversion,
    append_line,
    read_rows,
    results_files,
    results_name,
    rewrite_rows,
)

if TYPE_CHECKING:
    from dlmi.inverter import Inverter

_ORPHANS_END_WITHIN = 60.0  # seconds: a step and a checkpoint


def refuse_used_folder(folder: Path) -> None:
    """Raise `InputError` if a run has already written its results there."""
    if results_files(folder):
        raise InputError(
            f"Expected a fresh run folder, but {folder} holds the results of a run. Resume that "
            "run with `--ckpt_path`, or choose another folder."
        )


class ResultWriter(InversionCallback):
    """One JSON line per target in the run's folder.

    Each rank has a file of its own; rank 0 merges them when all are done. When a run goes on, the
    rows that are there count as finished, even those written after the checkpoint; only rows of
    interrupted targets, which go on now, are taken out.

    Attributes:
        path: This rank's file.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._earlier_rows: list[Inversion] = []
        self._lock: IO[bytes] | None = None

    def claim(self, folder: Path, rank: int = 0) -> None:
        """Keep others out of a folder, from now on; once is enough."""
        if self._lock is None:
            self._lock = lock_folder(folder, rank)

    def on_train_start(self, trainer: Trainer, pl_module: "Inverter") -> None:  # type: ignore[override]
        """Find the file; on rank 0, keep what an earlier part of this run finished."""
        folder, rank = pl_module.folder, pl_module.ranks.rank
        self.path = folder / results_name(rank)
        if rank == 0:
            self.claim(folder)
            wait_for_other_ranks(folder, _ORPHANS_END_WITHIN)
            self._take_over(trainer, pl_module)
        pl_module.ranks.barrier()
        self.claim(folder, rank)

    def _take_over(self, trainer: Trainer, module: "Inverter") -> None:
        if not results_files(module.folder):
            return
        if trainer.ckpt_path is None and not self.continues:
            refuse_used_folder(module.folder)
        rows = read_rows(module.folder, tolerate_cut=True)
        for row in rows:
            module.check_own(row)
        self._earlier_rows = [row for row in rows if row.stop_reason != "interrupted"]
        _merge(module.folder, self._earlier_rows)

    def earlier_rows(self) -> list[Inversion]:
        """The rows that are in the file from an earlier part of this run."""
        return self._earlier_rows

    def on_target_end(self, trainer: Trainer, module: "Inverter", row: Inversion) -> None:
        """Append the row and sync it to the disk."""
        if self.path is not None:
            append_line(self.path, row.to_json_line())

    def teardown(self, trainer: Trainer, pl_module: "Inverter", stage: str) -> None:  # type: ignore[override]
        """Merge the files of all ranks; let others have the folder."""
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
            self._lock.close()
            self._lock = None


def _merge(folder: Path, rows: list[Inversion]) -> None:
    """All rows in rank 0's file; those of the other ranks go when it is on the disk."""
    rewrite_rows(folder / RESULTS_FILE, rows)
    for file in results_files(folder):
        if file.name != RESULTS_FILE:
            file.unlink()
