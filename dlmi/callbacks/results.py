"""Writes `results.jsonl`: every finished row is on the disk before its slot is reused."""

from pathlib import Path
from typing import IO, TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer

from dlmi.callbacks.base import InversionCallback
from dlmi.errors import InputError
from dlmi.locks import lock_folder
from dlmi.results import RESULTS_FILE, Inversion, append_row, read_rows, rewrite_rows

if TYPE_CHECKING:
    from dlmi.inverter import Inverter


def refuse_used_folder(folder: Path) -> None:
    """Raise `InputError` if a run has already written its results there."""
    if (folder / RESULTS_FILE).exists():
        raise InputError(
            f"Expected a fresh run folder, but {folder} holds the results of a run. Resume that "
            "run with `--ckpt_path`, or choose another folder."
        )


class ResultWriter(InversionCallback):
    """One JSON line per target in the run's folder.

    When a run goes on, the rows that are there count as finished, even those written after the
    checkpoint; only rows of interrupted targets, which go on now, are taken out.

    Attributes:
        path: The file.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._earlier_rows: list[Inversion] = []
        self._lock: IO[bytes] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: "Inverter") -> None:  # type: ignore[override]
        """Find the file; keep what an earlier part of this run finished."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        self._lock = lock_folder(folder)
        self.path = folder / RESULTS_FILE
        if not self.path.exists():
            return
        if trainer.ckpt_path is None and not self.continues:
            refuse_used_folder(folder)
        rows = read_rows(self.path, tolerate_cut=True)
        for row in rows:
            pl_module.check_own(row)
        self._earlier_rows = [row for row in rows if row.stop_reason != "interrupted"]
        rewrite_rows(self.path, self._earlier_rows)

    def earlier_rows(self) -> list[Inversion]:
        """The rows that are in the file from an earlier part of this run."""
        return self._earlier_rows

    def on_target_end(self, trainer: Trainer, module: "Inverter", row: Inversion) -> None:
        """Append the row and sync it to the disk."""
        if self.path is None:
            return
        append_row(self.path, row)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let others have the folder."""
        self._unlock()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The same: Lightning tears nothing down after an error."""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
