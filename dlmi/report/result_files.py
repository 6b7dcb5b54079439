"""Result files as runs leave them: found, read line by line, and checked."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from dlmi.errors import InputError
from dlmi.gradient_rows import FILE_NAME as GRADIENTS_FILE
from dlmi.jsonl import build, parse_object, read_json_file, read_lines
from dlmi.rows import RESULTS_FILE, Inversion

Axis = Literal["step", "token_passes", "seconds"]
AXIS_UNITS = {"step": "steps", "token_passes": "token passes", "seconds": "seconds"}

# Written by `compare` beside each cell's results: the method's name in the grid, and the budgets.
CELL_FILE = "cell.json"
# And this where a cell came to grief.
FAILURE_FILE = "failure.json"

_NAMED_LINES = 10  # how many broken lines of a file are named one by one


class Budget(NamedTuple):
    """How much of what a target may have cost.

    >>> str(Budget("step", 2048.0))
    '2048 steps'
    """

    axis: Axis
    at: float

    def __str__(self) -> str:
        return f"{self.at:.12g} {AXIS_UNITS[self.axis]}"


@dataclass(frozen=True)
class _Cell:
    """What a report needs of a cell's file."""

    label: str
    axis: str
    budgets: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """Rows of one file, of one LM, dtype, target set, method and setting."""

    rows: tuple[Inversion, ...]
    name: str | None
    budgets: tuple[Budget, ...]


def result_files(path: Path, name: str) -> list[Path]:
    """Files of this name, of any worker, at or below a path; other files count as results."""
    if path.is_file():
        kind = GRADIENTS_FILE if path.name == GRADIENTS_FILE else RESULTS_FILE
        return [path] if kind == name else []
    # What is no plain file (a pipe, a loop of links) would be waited for without end.
    # Files of workers (once: ranks) are not merged yet if a run goes on, or was killed.
    patterns = [name, name.replace(".", ".worker*."), name.replace(".", ".rank*.")]
    return sorted(file for like in patterns for file in path.rglob(like) if file.is_file())


def read_runs(file: Path) -> tuple[list[Run], list[str]]:
    """The rows of a file by what they may be averaged with, and a note on the lines that are none.

    Of a target that was written twice the later row counts.
    """
    parts: dict[str, dict[tuple[str, int], Inversion]] = {}
    broken: dict[int, str] = {}
    try:
        for number, line in read_lines(file):
            try:
                row = Inversion.from_json(parse_object(line))
                _check_row(row)
            except InputError as error:
                broken[number] = str(error)
                continue
            settings = {**row.settings, "seed": None}
            kind = [row.fingerprint, row.dtype, row.target_set, row.method, settings]
            part = parts.setdefault(json.dumps(kind, sort_keys=True), {})
            part[row.target_id, row.seed] = row
    except OSError as error:
        return [], [f"{file}: cannot be read ({error.strerror})"]
    runs = [Run(tuple(part.values()), *_read_cell(file.parent)) for part in parts.values()]
    if not broken:
        return runs, [] if runs else [f"{file}: no rows"]
    named = ", ".join(map(str, list(broken)[:_NAMED_LINES]))
    more = len(broken) - _NAMED_LINES
    first, reason = next(iter(broken.items()))
    return runs, [
        f"{file}: {len(broken)} broken line{'s' if len(broken) > 1 else ''} left out, "
        f"{named}{f' and {more} more' if more > 0 else ''} (line {first}: {reason})"
    ]


def _check_row(row: Inversion) -> None:
    """Raise `InputError` for a row that is JSON but not a result that can be averaged."""
    if not row.trace or not row.target_ids or not row.prompt_ids:
        raise InputError("its trace, target or prompt is empty")
    for kind in ("prompt", "target", "output"):
        if len(getattr(row, f"{kind}_ids")) != len(getattr(row, f"{kind}_tokens")):
            raise InputError(f"its {kind} has not as many texts as ids")
    shares = [row.lcs, *(point.lcs for point in row.trace)]
    shares += [value for decodes in row.lcs_matrix.values() for value in decodes.values()]
    if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares):
        raise InputError("an LCS is not between 0 and 1")


def _read_cell(folder: Path) -> tuple[str | None, tuple[Budget, ...]]:
    """Name and budgets that a comparison gave a run; None outside of one."""
    try:
        cell = build(_Cell, read_json_file(folder / CELL_FILE) or {})
    except InputError:
        return None, ()
    is_known = cell.axis in get_args(Axis) and all(0 < at < math.inf for at in cell.budgets)
    budgets = sorted(cell.budgets) if is_known else []
    return cell.label, tuple(Budget(cast(Axis, cell.axis), at) for at in budgets)


def failed_cells(path: Path) -> Iterator[str]:
    """A note on each run of a comparison that did not end well."""
    for file in sorted(path.rglob(FAILURE_FILE)) if path.is_dir() else []:
        error = (read_json_file(file) or {}).get("error")
        yield f"{file.parent}: failed{f' ({error})' if isinstance(error, str) else ''}"
