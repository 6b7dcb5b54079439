"""What a report is made of: runs read from disk, and set apart where they cannot be compared.

Rows are averaged only within a `Group`: the same LM, dtype and set of targets. Within a group a
`Series` is one method in one setting, with all its seeds.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlmi.errors import InputError
from dlmi.gradient_rows import FILE_NAME as GRADIENTS_FILE
from dlmi.report.method_names import natural_order, run_labels
from dlmi.report.result_files import (
    Axis,
    Run,
    failed_cells,
    read_cell,
    read_results,
    result_files,
)
from dlmi.rows import RESULTS_FILE, Inversion, TracePoint

__all__ = ["Axis", "Group", "Loaded", "Series", "best_point", "last_point", "load"]


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


def load(paths: Sequence[Path], steps: Sequence[int] | None = None) -> Loaded:
    """Read run folders, comparison folders or results files.

    Args:
        paths: Where to look; a file that is found twice is read once.
        steps: At which steps traces are read, in place of what comparisons say.

    Raises:
        InputError: Where a path holds no results at all.
    """
    notes: list[str] = []
    results: dict[Path, Path] = {}  # resolved -> as the user wrote it
    gradients: dict[Path, Path] = {}
    for path in paths:
        files = {name: result_files(path, name) for name in (RESULTS_FILE, GRADIENTS_FILE)}
        if not any(files.values()):
            raise InputError(
                f"Expected RUNS to be folders with a {RESULTS_FILE} or a {GRADIENTS_FILE} (or "
                f"such files), but {path} {'holds none' if path.is_dir() else 'does not exist'}."
            )
        notes += failed_cells(path)
        for file in files[RESULTS_FILE]:
            results.setdefault(file.resolve(), file)
        for file in files[GRADIENTS_FILE]:
            gradients.setdefault(file.resolve(), file)
    runs: list[Run] = []
    for file in results.values():
        rows, broken = read_results(file)
        notes += broken
        if not rows:
            notes.append(f"{file}: no rows")
            continue
        label, budgets = read_cell(file.parent)
        runs.append(Run(file.parent, tuple(rows), label, budgets))
    if not runs and not gradients:
        raise InputError(
            f"Expected RUNS to hold result rows, but {', '.join(map(str, paths))} has none"
            f"{': ' + notes[0] if notes else ''}."
        )
    groups, doubles = _groups(runs)
    if steps is not None:
        wanted = tuple(sorted({float(step) for step in steps}))
        groups = [dataclasses.replace(group, budgets=("step", wanted)) for group in groups]
    notes += doubles + _unfinished(groups)
    return Loaded(tuple(groups), tuple(notes), tuple(gradients.values()))


def best_point(row: Inversion, axis: Axis = "step", at: float | None = None) -> TracePoint:
    """The best evaluation within a budget; a target that stopped early carries its value forward.

    Args:
        row: With its trace.
        axis: What the budget is counted in.
        at: The budget; None for the whole run.
    """
    return max(_within(row, axis, at), key=lambda point: (point.lcs, -point.discrete_loss))


def last_point(row: Inversion, axis: Axis = "step", at: float | None = None) -> TracePoint:
    """The latest evaluation within a budget, whether or not it is the best; as `best_point`."""
    return _within(row, axis, at)[-1]


def _within(row: Inversion, axis: Axis, at: float | None) -> Sequence[TracePoint]:
    return [p for p in row.trace if at is None or getattr(p, axis) <= at] or [row.trace[0]]


def _groups(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    labels = run_labels([run.label for run in runs], [run.rows[0] for run in runs])
    by_group: dict[tuple[str, str, str, str], list[tuple[str, Run]]] = {}
    for run, label in zip(runs, labels, strict=True):
        first = run.rows[0]
        key = (first.model, first.fingerprint, first.dtype, first.target_set)
        by_group.setdefault(key, []).append((label, run))
    groups, notes = [], []
    for key, members in by_group.items():
        series, doubles = _series(members)
        notes += doubles
        groups.append(Group(*key, series, _budgets(members)))
    return sorted(groups, key=lambda group: -len(group.rows)), notes


def _series(members: Sequence[tuple[str, Run]]) -> tuple[tuple[Series, ...], list[str]]:
    """The rows by label and N; of the same target and seed only the one with the larger budget."""
    rows: dict[tuple[str, int], dict[tuple[str, int], Inversion]] = {}
    doubles: dict[tuple[str, int], int] = {}
    for label, run in members:
        for row in run.rows:
            place = (label, len(row.prompt_ids))
            mine = rows.setdefault(place, {})
            before = mine.get((row.target_id, row.seed))
            if before is not None:
                doubles[place] = doubles.get(place, 0) + 1
            if before is None or _budget(row) > _budget(before):
                mine[row.target_id, row.seed] = row
    notes = [
        f"{label}, N={length}: {count} rows left out, their target and seed are there twice "
        "(the row with more steps is kept)"
        for (label, length), count in doubles.items()
    ]
    ordered = sorted(rows, key=lambda place: (natural_order(place[0]), place[1]))
    return tuple(Series(*place, tuple(rows[place].values())) for place in ordered), notes


def _budget(row: Inversion) -> int:
    steps = row.settings.get("steps")
    return steps if isinstance(steps, int) else row.steps


def _unfinished(groups: Sequence[Group]) -> list[str]:
    """A note on rows that carry their value beyond what they ran for without being solved."""
    notes = []
    for group in groups:
        axis, budgets = group.budgets
        for series in group.series:
            place = f"{group.model}, {series.label}, N={series.prompt_length}"
            interrupted = sum(row.stop_reason == "interrupted" for row in series.rows)
            if interrupted:
                notes.append(
                    f"{place}: {interrupted} of "
                    f"{len(series.rows)} rows were interrupted; they count with what they reached"
                )
            short = sum(
                row.stop_reason == "budget" and axis == "step" and row.steps < budgets[-1]
                for row in series.rows
            )
            if short:
                notes.append(
                    f"{place}: {short} of {len(series.rows)} rows "
                    f"had a budget of fewer than {budgets[-1]:g} steps; their last value is "
                    "carried forward"
                )
    return notes


def _budgets(members: Sequence[tuple[str, Run]]) -> tuple[Axis, tuple[float, ...]]:
    """Those of the comparison; outside of one, the most steps that any target had."""
    found = [run.budgets for _, run in members if run.budgets is not None]
    if found:
        axis = found[0][0]
        return axis, tuple(sorted({v for a, values in found if a == axis for v in values}))
    return "step", (float(max(row.steps for _, run in members for row in run.rows)),)
