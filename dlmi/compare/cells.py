"""A cell of a comparison: an ordinary `fit`, in a folder and a process of its own."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import dict_to_namespace

from dlmi.errors import InputError
from dlmi.jsonl import build, read_json_file
from dlmi.report.result_files import CELL_FILE, FAILURE_FILE, GridCell
from dlmi.rows import count_finished

_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Cell(GridCell):
    """One run of a comparison, as it is planned; its file says how far it has come."""

    folder: Path  # its own, an ordinary run folder; its name is the cell's
    place: str  # its name without the seed
    config: Path  # the method's configuration file
    overrides: dict[str, Any]  # settings of the grid on top of it
    targets: int | None  # None where their number is not known before the run
    token_passes: int | None  # upper bound for all targets; None where there is none

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def log(self) -> Path:
        """The output of its process."""
        return self.folder / "log.txt"

    @property
    def seconds(self) -> float | None:
        """Run time without interruptions; None unless it is done."""
        stored = self._stored()
        return stored.spent if stored.is_done else None

    @property
    def share(self) -> float:
        """The part of it that is done, from 0 to 1."""
        if self.seconds is not None:
            return 1.0
        return min(count_finished(self.folder) / self.targets, 1.0) if self.targets else 0.0

    @property
    def latest_line(self) -> str:
        """The last line of its output."""
        text = self.log.read_text("utf-8", "replace") if self.log.exists() else ""
        return (text.strip().splitlines() or [""])[-1].removeprefix("dlmi: error: ")

    def check_unchanged(self) -> None:
        """Raise `InputError` if the folder holds this cell with other settings."""
        before, now = _flat(self._stored().settings), _flat(self.settings)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise InputError(
                    f"Expected {self.folder} to be a cell of this grid, but it was run with {name} "
                    f"= {before.get(name)!r} and is now to be run with {now.get(name)!r}. Choose "
                    f"another `out`; `python -m dlmi report` still reads this one."
                )

    def run(self, tick: Callable[[], None]) -> str | None:
        """Run or resume it; returns the error that ended it, if any. `tick` is called often."""
        failure, overrides = self.folder / FAILURE_FILE, self.folder / "cell.yaml"
        self.folder.mkdir(parents=True, exist_ok=True)
        failure.unlink(missing_ok=True)
        spent = self._stored().spent
        self._store(spent)
        overrides.write_text(yaml.safe_dump(self.overrides, sort_keys=False), encoding="utf-8")
        logger = "--trainer.logger.init_args"
        command = [sys.executable, "-m", "dlmi", "fit", "--config", str(self.config)]
        command += ["--config", str(overrides), "--continue_run", "true"]
        command += [f"{logger}.save_dir", str(self.folder.parent.parent)]
        command += [f"{logger}.name", self.folder.parent.name, f"{logger}.version", self.name]
        began, exit_code = time.monotonic(), None
        with self.log.open("ab") as screen:
            # In its own session, so that Ctrl-C reaches it once: a second one stops it unsaved.
            process = subprocess.Popen(
                command, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                exit_code = _wait(process, tick)
            finally:
                self._store(spent + time.monotonic() - began, exit_code == 0)
        if exit_code == 0:
            return None
        error = self.latest_line or f"ended with exit code {exit_code} and no output"
        record = {"error": error, "exit_code": exit_code, "log": str(self.log)}
        failure.write_text(json.dumps(record) + "\n", encoding="utf-8")
        return error

    def _stored(self) -> GridCell:
        """The content of its file; a cell without one has its present settings."""
        file = self.folder / CELL_FILE
        found = read_json_file(file)
        try:
            return self if found is None else build(GridCell, found)
        except InputError as error:
            raise InputError(
                f"Expected {file} to be as `compare` wrote it, but {error}. Choose another `out`."
            ) from error

    def _store(self, spent: float, is_done: bool = False) -> None:
        record = {name: getattr(self, name) for name in GridCell.__dataclass_fields__}
        record |= {"spent": spent, "is_done": is_done}
        (self.folder / CELL_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")


def _wait(process: "subprocess.Popen[bytes]", tick: Callable[[], None]) -> int:
    """Wait for a cell; Ctrl-C and SIGTERM are passed on, and it has time to save itself."""
    # Set for SIGINT too: a shell that starts a command in the background makes it ignore SIGINT.
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(signum, signal.default_int_handler) for signum in signals]
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


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by their names on the command line, such as `model.method.tau0`."""
    items = dict_to_namespace(settings).items()
    return {name.replace(".init_args", ""): value for name, value in items}
