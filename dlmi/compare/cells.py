"""A cell on disk and at work: an ordinary `fit` in a process of its own."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmi.compare.grid import Cell, Grid, as_yaml
from dlmi.errors import InputError
from dlmi.jsonl import build, read_json_file
from dlmi.report.result_files import CELL_FILE, FAILURE_FILE
from dlmi.rows import count_finished

_POLL_SECONDS = 0.2
_LAST_BYTES = 4096


@dataclass(frozen=True)
class _Stored:
    """What a cell's file says of an earlier part of its run."""

    settings: dict[str, dict[str, Any]]
    spent: float
    is_done: bool = False


class CellRun:
    """One cell of a comparison and its folder.

    Args:
        grid: The comparison.
        cell: Which of its runs.
    """

    def __init__(self, grid: Grid, cell: Cell) -> None:
        self.cell = cell
        self.root = Path(grid.out)
        self.folder = self.root / cell.name
        self._log = self.folder / "log.txt"
        self._record: dict[str, Any] = {
            "label": cell.label,
            "axis": grid.axis,
            "budgets": cell.budgets,
            "settings": cell.settings,
        }

    def check_unchanged(self) -> None:
        """Raise `InputError` if the folder holds this cell with other settings."""
        stored = self._stored()
        if stored is None:
            return
        if "method" not in stored.settings.get("model", {}):
            raise InputError(
                f"Expected {self.root} to be a comparison of this version of dlmi, but "
                f"{self.cell.name} was run by an earlier one, whose cells cannot be continued. "
                f"Choose another `out`; `python -m dlmi report {self.root}` still reads it."
            )
        before, now = _flat(stored.settings), _flat(self._record["settings"])
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise InputError(
                    f"Expected the grid to be the one that {self.root} was begun with, but "
                    f"{self.cell.name} was run with {name} = {before.get(name)!r} and is now to be "
                    f"run with {now.get(name)!r}. Choose another `out`."
                )

    @property
    def seconds(self) -> float | None:
        """How long it took, with its stops in between; None unless it is done."""
        stored = self._stored()
        return stored.spent if stored is not None and stored.is_done else None

    @property
    def finished_rows(self) -> int:
        """Targets that are done with."""
        return count_finished(self.folder)

    @property
    def latest_line(self) -> str:
        """The last thing that it said."""
        try:
            return _last_line(self._log)
        except OSError:
            return ""

    def run(self, tick: Callable[[], None]) -> str | None:
        """Run it to its end, or on from where it was; the error that ended it, if one did.

        Args:
            tick: Called a few times a second.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / FAILURE_FILE).unlink(missing_ok=True)
        stored = self._stored()
        record = {**self._record, "spent": 0.0 if stored is None else stored.spent}
        self._store(record)
        overrides = self.folder / "cell.yaml"
        overrides.write_text(as_yaml(self.cell.overrides), encoding="utf-8")
        logger = "--trainer.logger.init_args"
        command = [sys.executable, "-m", "dlmi", "fit", "--config", str(self.cell.config)]
        command += ["--config", str(overrides), "--continue_run", "true"]
        command += [f"{logger}.save_dir", str(self.root.parent), f"{logger}.name", self.root.name]
        command += [f"{logger}.version", self.cell.name]
        began, exit_code = time.monotonic(), None
        with self._log.open("ab") as screen:
            # A session of its own: Ctrl-C comes from here, once, or it would stop without saving.
            process = subprocess.Popen(
                command, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                exit_code = _wait(process, tick)
            finally:
                record["spent"] += time.monotonic() - began
                self._store({**record, "is_done": exit_code == 0})
        if exit_code == 0:
            return None
        error = self.latest_line or f"ended with exit code {exit_code} and said nothing"
        failure = {"error": error, "exit_code": exit_code, "log": str(self._log)}
        (self.folder / FAILURE_FILE).write_text(json.dumps(failure) + "\n", encoding="utf-8")
        return error

    def _stored(self) -> _Stored | None:
        found = read_json_file(self.folder / CELL_FILE)
        try:
            return None if found is None else build(_Stored, found)
        except InputError as error:
            raise InputError(
                f"Expected {self.folder / CELL_FILE} to be as `compare` wrote it, but {error}. "
                "Choose another `out`."
            ) from error

    def _store(self, record: dict[str, Any]) -> None:
        (self.folder / CELL_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")


def _wait(process: "subprocess.Popen[bytes]", tick: Callable[[], None]) -> int:
    """Wait for a cell; Ctrl-C and SIGTERM reach it, and it gets the time to save itself."""
    # Both: a shell that starts this in the background lets it ignore Ctrl-C from the outset.
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(signum, _interrupt) for signum in signals]
    try:
        while (exit_code := process.poll()) is None:
            tick()
            time.sleep(_POLL_SECONDS)
        return exit_code
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.kill()
        raise
    finally:
        for signum, handler in zip(signals, previous, strict=True):
            signal.signal(signum, handler)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _last_line(log: Path) -> str:
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(0, size - _LAST_BYTES))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("dlmi: error: ") if lines else ""


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by the names that `fit` knows them by, such as `model.method.tau0`.

    >>> _flat({"model": {"method": {"class_path": "DLMI", "init_args": {"tau0": 1.0}}}})
    {'model.method.class_path': 'DLMI', 'model.method.tau0': 1.0}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, prefix if name == "init_args" else f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
