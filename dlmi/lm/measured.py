"""What was measured once on this machine, kept in a file of the cache."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from dlmi.errors import RunStopped
from dlmi.jsonl import read_json_file, rewrite_lines
from dlmi.lm.loading import cache_dir


def measured_file() -> Path:
    """The file: a JSON object with an entry for each measurement."""
    return cache_dir() / "measured.json"


def read_measured(key: str, name: str, choices: tuple[Any, ...]) -> dict[str, Any] | None:
    """An entry whose `name` is one of some choices; None where there is none."""
    known = (read_json_file(measured_file()) or {}).get(key)
    return known if isinstance(known, dict) and known.get(name) in choices else None


def write_measured(key: str, entry: dict[str, Any]) -> None:
    """Add an entry, or replace it. Where it cannot be written, nothing is kept."""
    everything = read_json_file(measured_file()) or {}
    with contextlib.suppress(OSError, RunStopped):
        measured_file().parent.mkdir(parents=True, exist_ok=True)
        rewrite_lines(measured_file(), [json.dumps({**everything, key: entry}, indent=1)])


@rank_zero_only
def announce(message: str) -> None:
    """Log what is measured, and what was decided; the command line shows it."""
    logging.getLogger(__name__).info(message)
