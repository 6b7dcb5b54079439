"""Result files as runs leave them: found, read line by line, and checked."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from dlmi.errors import InputError
from dlmi.gradient_rows import FILE_NAME as GRADIENTS_FILE
from dlmi.jsonl import build, parse_object, read_json_file, read_lines
from dlmi.rows import RESULTS_FILE, Inversion

Axis = Literal["step", "token_passes", "seconds"]

# Written by `compare` beside each cell's results: the method's name in the grid, and the budgets.
CELL_FILE = "cell.json"
# And this where a cell came to grief.
FAILURE_FILE = "failure.json"

# How many broken lines of a file are named one by one.
_NAMED_LINES = 10


@dataclass(frozen=True)
class _CellRecord:
    """What a report needs of a cell's file."""

    label: str
    axis: str
    budgets: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """One results file.

    Attributes:
        folder: Where it lies.
        rows: Its rows; the later one where a target was written twice.
        label: The method's name in a comparison, or None outside of one.
        budgets: Axis and values at which a comparison reads the traces.
    """

    folder: Path
    rows: tuple[Inversion, ...]
    label: str | None
    budgets: tuple[Axis, tuple[float, ...]] | None


def result_files(path: Path, name: str) -> list[Path]:
    """Files of this name, of any rank, at or below a path; any other file counts as results."""
    if path.is_file():
        kind = GRADIENTS_FILE if path.name == GRADIENTS_FILE else RESULTS_FILE
        return [path] if kind == name else []
    # What is no plain file (a pipe, a loop of links) would be waited for without end.
    of_ranks = name.replace(".", ".rank*.")  # not merged yet: the run goes on, or was killed
    found = [*path.rglob(name), *path.rglob(of_ranks)]
    return sorted(file for file in found if file.is_file())


def read_results(file: Path) -> tuple[list[Inversion], list[str]]:
    """The rows of a file, and a note on the lines that are none."""
    rows: dict[str, Inversion] = {}
    broken: dict[int, str] = {}
    try:
        for number, line in read_lines(file):
            try:
                row = Inversion.from_json(parse_object(line))
                _check_row(row)
                rows[row.target_id] = row
            except InputError as error:
                broken[number] = str(error)
    except OSError as error:
        return [], [f"{file}: cannot be read ({error.strerror})"]
    return list(rows.values()), _broken_note(file, broken)


def _broken_note(file: Path, broken: dict[int, str]) -> list[str]:
    if not broken:
        return []
    named = ", ".join(map(str, list(broken)[:_NAMED_LINES]))
    more = len(broken) - _NAMED_LINES
    first, reason = next(iter(broken.items()))
    return [
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


def read_cell(folder: Path) -> tuple[str | None, tuple[Axis, tuple[float, ...]] | None]:
    """Label and budgets that a comparison gave a run; None outside of one."""
    try:
        cell = build(_CellRecord, read_json_file(folder / CELL_FILE) or {})
    except InputError:
        return None, None
    is_known = cell.axis in get_args(Axis) and all(0 < b < math.inf for b in cell.budgets)
    budgets = tuple(sorted(cell.budgets))
    return cell.label, (cast(Axis, cell.axis), budgets) if is_known and budgets else None


def failed_cells(path: Path) -> Iterator[str]:
    """A note on each run of a comparison that did not end well."""
    for file in sorted(path.rglob(FAILURE_FILE)) if path.is_dir() else []:
        error = (read_json_file(file) or {}).get("error")
        yield f"{file.parent}: failed{f' ({error})' if isinstance(error, str) else ''}"
