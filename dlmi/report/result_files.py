"""Finding, reading and checking files of rows."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from msgspec import Meta

from dlmi.errors import InputError
from dlmi.gradient_rows import FILE_NAME as GRADIENTS_FILE
from dlmi.gradient_rows import GradientRow
from dlmi.jsonl import build, read_json_file, read_objects
from dlmi.rows import RESULTS_FILE, Inversion

Axis = Literal["step", "token_passes", "seconds"]
AXIS_UNITS = {"step": "steps", "token_passes": "token passes", "seconds": "seconds"}

# `compare` writes these next to a cell's results: a `GridCell`, and any error.
CELL_FILE = "cell.json"
FAILURE_FILE = "failure.json"

# Workers (in earlier runs: ranks) have files of their own until the run ends.
_ROW_FILES = re.compile(r"(results|gradients)(\.(worker|rank).*)?\.jsonl")
_NAMED_LINES = 10  # broken lines of a file whose numbers a note lists

_T = TypeVar("_T")


class Budget(NamedTuple):
    """What one target may use; shown as `2048 steps`."""

    axis: Axis
    at: float

    def __str__(self) -> str:
        return f"{self.at:.12g} {AXIS_UNITS[self.axis]}"


@dataclass(frozen=True)
class GridCell:
    """What the file of a comparison's cell holds."""

    label: str | None  # the method's name in the grid
    axis: Axis  # what budgets are counted in
    budgets: Sequence[Annotated[float, Meta(gt=0)]]  # at which traces are read, ascending
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of model and data
    spent: float = 0.0  # seconds, without interruptions
    is_done: bool = False


class Run(NamedTuple):
    """Rows of one file, of one LM, dtype, target set, method and setting."""

    cell: GridCell
    rows: list[Inversion]


def read_files(paths: Sequence[Path]) -> tuple[list[Run], list[list[GradientRow]], list[str]]:
    """All runs, the gradient rows of each file, and notes on what could not be read."""
    files: dict[Path, Path] = {}
    for path in paths:
        below = [file for file in path.rglob("*.jsonl") if _ROW_FILES.fullmatch(file.name)]
        # Only plain files: reading from a pipe might never end.
        found = {file.resolve(): file for file in sorted([path, *below]) if file.is_file()}
        if not found:
            raise InputError(
                f"Expected RUNS to be folders with a {RESULTS_FILE} or a {GRADIENTS_FILE} (or "
                f"such files), but {path} {'holds none' if path.is_dir() else 'does not exist'}."
            )
        files = {**found, **files}
    runs: list[Run] = []
    gradients: list[list[GradientRow]] = []
    notes = []
    for failure in sorted(file for path in paths for file in path.rglob(FAILURE_FILE)):
        error = (read_json_file(failure) or {}).get("error")
        notes.append(f"{failure.parent}: failed{f' ({error})' if isinstance(error, str) else ''}")
    for file in files.values():
        if file.name.startswith("gradients"):
            gradients.append(_read_file(file, GradientRow.from_json, notes))
        else:
            runs += _runs(file.parent, _read_file(file, _checked_row, notes))
    return runs, gradients, notes


def _read_file(file: Path, make: Callable[[dict[str, Any]], _T], notes: list[str]) -> list[_T]:
    """The rows of a file; a note is added on lines that are none."""
    try:
        found = list(read_objects(file, make))
    except OSError as error:
        notes.append(f"{file}: cannot be read ({error.strerror})")
        return []
    rows = [row for _, row in found if not isinstance(row, InputError)]
    broken = [(number, row) for number, row in found if isinstance(row, InputError)]
    if broken:
        named = ", ".join(str(number) for number, _ in broken[:_NAMED_LINES])
        more = f" and {len(broken) - _NAMED_LINES} more" if len(broken) > _NAMED_LINES else ""
        notes.append(
            f"{file}: {len(broken)} broken line{'s' if len(broken) > 1 else ''} left out, "
            f"{named}{more} (line {broken[0][0]}: {broken[0][1]})"
        )
    elif not rows:
        notes.append(f"{file}: no rows")
    return rows


def _runs(folder: Path, rows: list[Inversion]) -> list[Run]:
    """The rows of a file by LM, targets and settings; of duplicates the latest."""
    cell = GridCell(None, "step", ())  # unless the run is part of a comparison
    with contextlib.suppress(InputError):
        cell = build(GridCell, read_json_file(folder / CELL_FILE) or {})
    parts: dict[str, dict[tuple[str, int], Inversion]] = {}
    for row in rows:
        kind = [row.fingerprint, row.dtype, row.target_set, row.method]
        part = json.dumps([*kind, {**row.settings, "seed": None}], sort_keys=True)
        parts.setdefault(part, {})[row.target_id, row.seed] = row
    return [Run(cell, list(part.values())) for part in parts.values()]


def _checked_row(line: dict[str, Any]) -> Inversion:
    """A result row; `InputError` for one that is JSON but cannot be averaged."""
    row = Inversion.from_json(line)
    if not row.trace or not row.target_ids or not row.prompt_ids:
        raise InputError("its trace, target or prompt is empty")
    for kind in ("prompt", "target", "output"):
        if len(getattr(row, f"{kind}_ids")) != len(getattr(row, f"{kind}_tokens")):
            raise InputError(f"its {kind} has not as many texts as ids")
    shares = [row.lcs, *(point.lcs for point in row.trace)]
    shares += [value for decodes in row.lcs_matrix.values() for value in decodes.values()]
    if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares):
        raise InputError("an LCS is not between 0 and 1")
    return row
