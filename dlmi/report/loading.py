"""What a report is made of: rows read from disk, and set apart where they cannot be compared.

Rows are averaged only within a `Group`: the same LM, dtype and set of targets. Within a group a
`Series` is one method in one setting, with all its seeds.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlmi.errors import InputError
from dlmi.gradient_rows import FILE_NAME as GRADIENTS_FILE
from dlmi.report.gradient_sets import GradientSet, read_gradients
from dlmi.report.names import (
    natural_order,
    run_labels,
    settings_text,
    shared_restrictions,
)
from dlmi.report.result_files import Budget, Run, failed_cells, read_runs, result_files
from dlmi.rows import RESULTS_FILE, Inversion, TracePoint


@dataclass(frozen=True)
class Series:
    """One method in one setting and N: all its rows, over targets and seeds."""

    label: str
    prompt_length: int
    rows: tuple[Inversion, ...]


@dataclass(frozen=True)
class Group:
    """Rows that may be compared: one LM, one dtype, one set of targets."""

    model: str  # its first name, where runs call it differently
    fingerprint: str
    dtype: str
    target_set: str
    series: tuple[Series, ...]  # by label, then N
    budgets: tuple[Budget, ...]  # ascending; what has no budget of its own is told of the last

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

    @property
    def mixed(self) -> str:
        """Where and with what rows were made, as far as they differ in it; mostly nothing."""
        found: dict[str, set[str]] = {}
        for row in self.rows:
            named = {"LM": row.model, "revision": row.revision, "device": row.device}
            passes = {"passes": row.settings.get("precision") or row.dtype}
            for name, value in {**named, **passes, **row.versions}.items():
                found.setdefault(name, set()).add(str(value))
        several = {name: " / ".join(sorted(vs)) for name, vs in found.items() if len(vs) > 1}
        return "; ".join(f"{name}: {values}" for name, values in several.items())


@dataclass(frozen=True)
class ReportData:
    """Everything that was read, the largest group first."""

    groups: tuple[Group, ...]
    notes: tuple[str, ...]  # what was wrong with the files, and what a reader must know of rows
    gradients: tuple[GradientSet, ...] = ()

    @property
    def rows(self) -> list[Inversion]:
        """All rows."""
        return [row for group in self.groups for row in group.rows]

    @property
    def labels(self) -> list[str]:
        """All methods, in order."""
        return list(dict.fromkeys(label for group in self.groups for label in group.labels))

    @property
    def held_to(self) -> str:
        """What restricts all prompts, as a sentence, so that labels need not say it."""
        found = settings_text(shared_restrictions(self.rows))
        return f" All prompts were held to {found}." if found else ""

    def titled(self) -> list[tuple[str, Group]]:
        """Each group with its LM and whatever else tells it from others of that LM.

        Folders are cut to their last part where that leaves the groups distinct.
        """
        names = []
        for group in self.groups:
            alike = [other for other in self.groups if other.model == group.model]
            parts = [group.model]
            if len({other.dtype for other in alike}) > 1:
                parts.append(group.dtype)
            if len({other.target_set for other in alike}) > 1:
                parts.append(f"targets {group.target_set[:6]}")
            if len({other.fingerprint for other in alike}) > 1:
                parts.append(f"weights {group.fingerprint[:6]}")
            names.append(" · ".join(parts))
        short = [re.split(r"[/\\]", name.rstrip("/\\"))[-1] for name in names]
        is_distinct = len(set(short)) == len(short)
        return list(zip(short if is_distinct else names, self.groups, strict=True))

    def places(self) -> Iterator[tuple[str, Group, list[Series]]]:
        """The series of each N of each group, with what that is called."""
        for title, group in self.titled():
            for length in group.prompt_lengths:
                yield title, group, [s for s in group.series if s.prompt_length == length]

    def each(self) -> Iterator[tuple[str, Group, Series]]:
        """Every series with its group and what that is called, by N."""
        for title, group, members in self.places():
            for series in members:
                yield title, group, series


def best_point(row: Inversion, budget: Budget) -> TracePoint:
    """The best evaluation within a budget; a target that stopped early carries its value on."""
    return max(points_within(row, budget), key=lambda point: (point.lcs, -point.discrete_loss))


def last_point(row: Inversion, budget: Budget) -> TracePoint:
    """The latest evaluation within a budget, whether or not it is the best; as `best_point`."""
    return points_within(row, budget)[-1]


def points_within(row: Inversion, budget: Budget) -> Sequence[TracePoint]:
    """The evaluations that a budget covers, and the first in any case."""
    return [p for p in row.trace if getattr(p, budget.axis) <= budget.at] or [row.trace[0]]


def load(paths: Sequence[Path], steps: Sequence[int] | None = None) -> ReportData:
    """Read run folders, comparison folders, results files or gradient files.

    Args:
        paths: Where to look; a file that is found twice is read once.
        steps: At which steps traces are read, in place of what comparisons say.

    Raises:
        InputError: Where a path holds no such file, or all of them together no row.
    """
    notes: list[str] = []
    kinds: dict[str, dict[Path, Path]] = {RESULTS_FILE: {}, GRADIENTS_FILE: {}}
    for path in paths:
        found = {name: result_files(path, name) for name in kinds}
        if not any(found.values()):
            raise InputError(
                f"Expected RUNS to be folders with a {RESULTS_FILE} or a {GRADIENTS_FILE} (or "
                f"such files), but {path} {'holds none' if path.is_dir() else 'does not exist'}."
            )
        notes += failed_cells(path)
        for name, files in found.items():
            kinds[name] = {file.resolve(): file for file in files} | kinds[name]
    runs: list[Run] = []
    for file in kinds[RESULTS_FILE].values():
        found_runs, broken = read_runs(file)
        runs, notes = runs + found_runs, notes + broken
    gradients, unread = read_gradients(list(kinds[GRADIENTS_FILE].values()))
    notes += unread
    if not runs and not gradients:
        raise InputError(
            f"Expected RUNS to hold result or gradient rows, but {', '.join(map(str, paths))} has "
            f"none{': ' + notes[0] if notes else ''}."
        )
    wanted = tuple(Budget("step", float(step)) for step in sorted(set(steps or ())))
    groups, doubles = _groups(runs, wanted)
    return ReportData(tuple(groups), (*notes, *doubles, *_notes(groups)), tuple(gradients))


def _groups(runs: Sequence[Run], wanted: tuple[Budget, ...]) -> tuple[list[Group], list[str]]:
    """The runs by LM, dtype and targets, and notes on rows that are there twice."""
    labels = run_labels([run.name for run in runs], [run.rows for run in runs])
    by_group: dict[tuple[str, str, str], list[tuple[str, Run]]] = {}
    for run, label in zip(runs, labels, strict=True):
        first = run.rows[0]
        key = (first.fingerprint, first.dtype, first.target_set)
        by_group.setdefault(key, []).append((label, run))
    groups, notes = [], []
    for key, members in by_group.items():
        series, doubles = _series(members)
        notes += doubles
        model = members[0][1].rows[0].model
        groups.append(Group(model, *key, series, wanted or _budgets([run for _, run in members])))
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
            if before is None or _budget_steps(row) > _budget_steps(before):
                mine[row.target_id, row.seed] = row
    notes = [
        f"{label}, N={length}: {count} rows left out, their target and seed are there twice "
        "(the row with more steps is kept)"
        for (label, length), count in doubles.items()
    ]
    ordered = sorted(rows, key=lambda place: (natural_order(place[0]), place[1]))
    return tuple(Series(*place, tuple(rows[place].values())) for place in ordered), notes


def _budget_steps(row: Inversion) -> int:
    steps = row.settings.get("steps")
    return steps if isinstance(steps, int) else row.steps


def _budgets(runs: Sequence[Run]) -> tuple[Budget, ...]:
    """Those of the comparison; outside of one, the most steps that any target had."""
    found = [budget for run in runs for budget in run.budgets]
    if found:
        return tuple(sorted({budget for budget in found if budget.axis == found[0].axis}))
    return (Budget("step", float(max(row.steps for run in runs for row in run.rows))),)


def _notes(groups: Sequence[Group]) -> Iterator[str]:
    """What a reader must know of rows that do not end where the last budget does."""
    for group in groups:
        last = group.budgets[-1]
        for series in group.series:
            rows = series.rows
            is_short = [row.stop_reason == "budget" and row.steps < last.at for row in rows]
            found = {
                "were interrupted; they count with what they reached": sum(
                    row.stop_reason == "interrupted" for row in rows
                ),
                f"had a budget of fewer than {last}; their last value is carried forward": (
                    sum(is_short) if last.axis == "step" else 0
                ),
                f"found their prompt only beyond {last}; they count with what they had by then": (
                    sum(best_point(row, last).lcs < row.lcs for row in rows)
                ),
            }
            for what, count in found.items():
                if count:
                    place = f"{group.model}, {series.label}, N={series.prompt_length}"
                    yield f"{place}: {count} of {len(rows)} rows {what}"
