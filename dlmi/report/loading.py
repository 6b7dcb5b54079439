"""What a report is made of: runs read from disk, and set apart where they cannot be compared.

Rows are averaged only within a `Group`: the same LM, dtype and set of targets. Within a group a
`Series` is one method in one setting, with all its seeds.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlmi.errors import InputError
from dlmi.results import Inversion
from dlmi.slots import TracePoint

Axis = Literal["step", "token_passes", "seconds"]

# Written by `compare` beside each cell's results: the method's name in the grid, and the budgets.
CELL_FILE = "cell.json"
# And this in place of results, or beside some of them, where a cell came to grief.
FAILURE_FILE = "failure.json"

# Settings that do not tell methods apart: they have axes of their own in a report.
_AXES = {"prompt_length", "steps", "token_budget", "eval_every", "seed"}


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


@dataclass(frozen=True)
class Series:
    """One method in one setting: all its rows, over targets and seeds.

    Attributes:
        label: What figures and tables call it.
        prompt_length: N.
        rows: Over targets and seeds.
    """

    label: str
    prompt_length: int
    rows: tuple[Inversion, ...]


@dataclass(frozen=True)
class Group:
    """Rows that may be compared: one LM, one dtype, one set of targets.

    Attributes:
        model: Name of the LM.
        fingerprint: Hash of its weights.
        dtype: Of the LM.
        target_set: Hash of the targets.
        series: By label, then prompt length.
        budgets: Axis and values at which traces are read; the last is the whole run.
    """

    model: str
    fingerprint: str
    dtype: str
    target_set: str
    series: tuple[Series, ...]
    budgets: tuple[Axis, tuple[float, ...]]

    @property
    def rows(self) -> list[Inversion]:
        """All rows."""
        return [row for series in self.series for row in series.rows]

    @property
    def prompt_lengths(self) -> list[int]:
        """All N, ascending."""
        return sorted({series.prompt_length for series in self.series})

    @property
    def labels(self) -> list[str]:
        """All methods, in order."""
        return list(dict.fromkeys(series.label for series in self.series))


@dataclass(frozen=True)
class Loaded:
    """Everything that was read.

    Attributes:
        groups: What may be compared, largest first.
        notes: What was wrong with the files: lines that were left out, and failed cells.
        gradients: Files with gradient statistics that lie beside the results.
    """

    groups: tuple[Group, ...]
    notes: tuple[str, ...]
    gradients: tuple[Path, ...]


def load(paths: Sequence[Path]) -> Loaded:
    """Read run folders, comparison folders or results files.

    Raises:
        InputError: Where a path holds no results at all.
    """
    notes: list[str] = []
    runs: list[Run] = []
    gradients: list[Path] = []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("results.jsonl"))
        beside = [] if path.is_file() else sorted(path.rglob("gradients.jsonl"))
        if not files and not beside:
            raise InputError(
                f"Expected RUNS to be folders with a results.jsonl or a gradients.jsonl (or such "
                f"files), but {path} "
                f"{'holds none' if path.is_dir() else 'does not exist'}."
            )
        gradients += beside
        notes += _failed_cells(path)
        for file in files:
            rows, broken = _read_lines(file)
            notes += broken
            if not rows:
                notes.append(f"{file}: no rows yet")
                continue
            label, budgets = _read_cell(file.parent)
            runs.append(Run(file.parent, tuple(rows), label, budgets))
    if not runs and not gradients:
        raise InputError(
            f"Expected RUNS to hold result rows, but {', '.join(map(str, paths))} has none"
            f"{': ' + notes[0] if notes else ''}."
        )
    return Loaded(tuple(_groups(runs)), tuple(notes), tuple(dict.fromkeys(gradients)))


def best_point(row: Inversion, axis: Axis = "step", at: float | None = None) -> TracePoint:
    """The best evaluation within a budget; a target that stopped early carries its value forward.

    Args:
        row: With its trace.
        axis: What the budget is counted in.
        at: The budget; None for the whole run.
    """
    within = [p for p in row.trace if at is None or getattr(p, axis) <= at] or [row.trace[0]]
    return max(within, key=lambda point: (point.lcs, -point.discrete_loss))


def _read_lines(file: Path) -> tuple[list[Inversion], list[str]]:
    """The rows of a file, and a note on each line that is not one."""
    rows: dict[str, Inversion] = {}
    notes = []
    try:
        data = file.read_bytes()
    except OSError as error:
        return [], [f"{file}: cannot be read ({error})"]
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            row = Inversion.from_json(json.loads(line))
            if not row.trace or not row.target_ids:
                raise InputError("its trace or target is empty")
            rows[row.target_id] = row
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            notes.append(f"{file}, line {number}: left out, not a result row ({error})")
    return list(rows.values()), notes


def _read_cell(folder: Path) -> tuple[str | None, tuple[Axis, tuple[float, ...]] | None]:
    try:
        cell = json.loads((folder / CELL_FILE).read_text(encoding="utf-8"))
        return str(cell["label"]), (cell["axis"], tuple(cell["budgets"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _failed_cells(path: Path) -> Iterator[str]:
    for file in sorted(path.rglob(FAILURE_FILE)) if path.is_dir() else []:
        try:
            yield f"{file.parent}: failed ({json.loads(file.read_text(encoding='utf-8'))['error']})"
        except (OSError, ValueError, KeyError, TypeError):
            yield f"{file.parent}: failed"


def _groups(runs: Sequence[Run]) -> list[Group]:
    labels = _labels(runs)
    by_group: dict[tuple[str, str, str, str], list[tuple[str, Run]]] = {}
    for run, label in zip(runs, labels, strict=True):
        first = run.rows[0]
        key = (first.model, first.fingerprint, first.dtype, first.target_set)
        by_group.setdefault(key, []).append((label, run))
    groups = [Group(*key, _series(members), _budgets(members)) for key, members in by_group.items()]
    return sorted(groups, key=lambda group: -len(group.rows))


def _series(members: Sequence[tuple[str, Run]]) -> tuple[Series, ...]:
    rows: dict[tuple[str, int], list[Inversion]] = {}
    for label, run in members:
        for row in run.rows:
            rows.setdefault((label, len(row.prompt_ids)), []).append(row)
    return tuple(Series(label, length, tuple(found)) for (label, length), found in rows.items())


def _budgets(members: Sequence[tuple[str, Run]]) -> tuple[Axis, tuple[float, ...]]:
    """Those of the comparison; outside of one, the most steps that any target had."""
    found = [run.budgets for _, run in members if run.budgets is not None]
    if found:
        axis = found[0][0]
        return axis, tuple(sorted({v for a, values in found if a == axis for v in values}))
    return "step", (float(max(row.steps for _, run in members for row in run.rows)),)


def _labels(runs: Sequence[Run]) -> list[str]:
    """The grid's names; else the class, with the settings in which its runs differ."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if run.label is None:
            settings.setdefault(run.rows[0].method, []).append(run.rows[0].settings)
    labels = []
    for run in runs:
        if run.label is not None:
            labels.append(run.label)
            continue
        method, mine = run.rows[0].method, run.rows[0].settings
        differing = [
            f"{name}={mine.get(name)}"
            for name in mine
            if name not in _AXES and _differs(name, settings[method])
        ]
        labels.append(f"{method}({', '.join(differing)})" if differing else method)
    return labels


def _differs(name: str, settings: Iterable[dict[str, Any]]) -> bool:
    return len({json.dumps(s.get(name), sort_keys=True) for s in settings}) > 1
