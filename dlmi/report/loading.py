"""The rows of a report, in groups that can be compared: one LM, one dtype, one set of targets."""

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlmi.errors import InputError
from dlmi.report.gradient_sets import GradientSet, gradient_sets
from dlmi.report.names import natural_order, run_labels, settings_text, shared_restrictions
from dlmi.report.result_files import Budget, Run, read_files
from dlmi.rows import Inversion, TracePoint


@dataclass(frozen=True)
class Series:
    """One method in one setting and N: all its rows, over targets and seeds."""

    label: str
    prompt_length: int
    rows: tuple[Inversion, ...]


@dataclass(frozen=True)
class Group:
    """Rows that may be compared: one LM, one dtype, one set of targets."""

    title: str  # the LM and what else tells it from other groups
    model: str  # its first name, where runs call it differently
    fingerprint: str
    dtype: str
    target_set: str
    series: tuple[Series, ...]  # by N, then label
    budgets: tuple[Budget, ...]  # ascending; a table without a budget column is at the last

    @property
    def rows(self) -> list[Inversion]:
        """All rows."""
        return [row for series in self.series for row in series.rows]

    @property
    def prompt_lengths(self) -> list[int]:
        """All N, ascending."""
        return sorted({series.prompt_length for series in self.series})

    @property
    def mixed(self) -> str:
        """In what rows differ that is no setting of a method: versions, device, passes."""
        ways = []
        for row in self.rows:
            passes = row.settings.get("pass_dtype") or row.settings.get("precision") or row.dtype
            named = {"LM": row.model, "revision": row.revision, "device": row.device}
            ways.append({**named, "passes": passes, **row.versions})
        found = every_value(ways).items()
        return "; ".join(f"{name}: {' / '.join(vs)}" for name, vs in found if len(vs) > 1)


def every_value(named: Iterable[Mapping[str, object]]) -> dict[str, list[str]]:
    """All values that each name has as text, sorted."""
    found = defaultdict(set)
    for name, value in itertools.chain(*(each.items() for each in named)):
        found[name].add(value if isinstance(value, str) else json.dumps(value))
    return {name: sorted(values) for name, values in found.items()}


@dataclass(frozen=True)
class ReportData:
    """Everything that was read, the largest group first."""

    groups: tuple[Group, ...]
    notes: tuple[str, ...]  # problems of the files, and rows that need an explanation
    gradients: tuple[GradientSet, ...] = ()

    @property
    def rows(self) -> list[Inversion]:
        """All rows."""
        return [row for group in self.groups for row in group.rows]

    @property
    def labels(self) -> list[str]:
        """All methods, in order."""
        return sorted({series.label for _, series in self.each()}, key=natural_order)

    @property
    def held_to(self) -> str:
        """What restricts all prompts, as a sentence; labels leave it out."""
        found = settings_text(shared_restrictions(self.rows))
        return f" All prompts were held to {found}." if found else ""

    def places(self) -> Iterator[tuple[Group, list[Series]]]:
        """The series of each N of each group."""
        for group in self.groups:
            for _, found in itertools.groupby(group.series, lambda series: series.prompt_length):
                yield group, list(found)

    def each(self) -> Iterator[tuple[Group, Series]]:
        """Every series with its group."""
        return ((group, series) for group in self.groups for series in group.series)


def best_point(row: Inversion, budget: Budget) -> TracePoint:
    """The best evaluation within a budget; a target that stopped early carries its value on."""
    return max(points_within(row, budget), key=lambda point: (point.lcs, -point.discrete_loss))


def points_within(row: Inversion, budget: Budget) -> Sequence[TracePoint]:
    """The evaluations that a budget covers, and the first in any case."""
    return [p for p in row.trace if getattr(p, budget.axis) <= budget.at] or [row.trace[0]]


def load(paths: Sequence[Path], steps: Sequence[int] = ()) -> ReportData:
    """Read run folders, comparison folders, results files or gradient files.

    `steps` replace the budgets of comparisons. `InputError` where a path holds no such file, or all
    of them together no row.
    """
    runs, gradients, notes = read_files(paths)
    if not runs and not any(gradients):
        raise InputError(
            f"Expected RUNS to hold result or gradient rows, but {', '.join(map(str, paths))} has "
            f"none{': ' + notes[0] if notes else ''}."
        )
    groups, doubles = _groups(runs, [Budget("step", step) for step in sorted(set(steps))])
    notes += doubles + [note for group in groups for note in _notes(group)]
    return ReportData(tuple(groups), tuple(notes), tuple(gradient_sets(gradients)))


def _groups(runs: Sequence[Run], wanted: Sequence[Budget]) -> tuple[list[Group], list[str]]:
    """The runs by LM, dtype and targets, and notes on duplicate rows."""
    by_group: dict[tuple[str, str, str], list[tuple[str, Run]]] = defaultdict(list)
    labels = run_labels([(run.cell.label, run.rows) for run in runs])
    for run, label in zip(runs, labels, strict=True):
        first = run.rows[0]
        by_group[first.fingerprint, first.dtype, first.target_set].append((label, run))
    groups, notes = [], []
    for key, members in by_group.items():
        series, doubles = _series(members)
        notes += doubles
        budgets = wanted or _budgets([run for _, run in members])
        groups.append(Group("", members[0][1].rows[0].model, *key, series, tuple(budgets)))
    groups.sort(key=lambda group: -len(group.rows))
    titles = _titles(groups)
    return [replace(group, title=t) for group, t in zip(groups, titles, strict=True)], notes


def _series(members: Sequence[tuple[str, Run]]) -> tuple[tuple[Series, ...], list[str]]:
    """The rows by N and label; of the same target and seed only the one with the larger budget."""
    kept: dict[tuple[int, str], dict[tuple[str, int], Inversion]] = defaultdict(dict)
    doubles: Counter[tuple[int, str]] = Counter()
    for label, run in members:
        for row in run.rows:
            place, key = (len(row.prompt_ids), label), (row.target_id, row.seed)
            doubles[place] += key in kept[place]
            kept[place][key] = max(kept[place].get(key, row), row, key=_budget_steps)
    notes = [
        f"{label}, N={length}: {count} rows left out, their target and seed are there twice "
        "(the row with the larger budget is kept)"
        for (length, label), count in doubles.items()
        if count
    ]
    ordered = sorted(kept, key=lambda place: (place[0], natural_order(place[1])))
    return tuple(Series(n, length, tuple(kept[length, n].values())) for length, n in ordered), notes


def _budget_steps(row: Inversion) -> int:
    steps = row.settings.get("steps")
    return steps if isinstance(steps, int) else row.steps


def _budgets(runs: Sequence[Run]) -> list[Budget]:
    """Those of the comparison; outside of one, the most steps that any target had."""
    found = [Budget(run.cell.axis, at) for run in runs for at in run.cell.budgets]
    if found:
        return sorted({budget for budget in found if budget.axis == found[0].axis})
    return [Budget("step", float(max(row.steps for run in runs for row in run.rows)))]


def _titles(groups: Sequence[Group]) -> list[str]:
    """Each group's LM and what distinguishes it from other groups of that LM.

    Paths are cut to their last part where that leaves the titles distinct.
    """
    titles = []
    for group in groups:
        names = {
            "dtype": group.dtype,
            "target_set": f"targets {group.target_set[:6]}",
            "fingerprint": f"weights {group.fingerprint[:6]}",
        }
        alike = [other for other in groups if other.model == group.model]
        told_by = [n for field, n in names.items() if len({getattr(g, field) for g in alike}) > 1]
        titles.append(" · ".join([group.model, *told_by]))
    short = [re.split(r"[/\\]", title.rstrip("/\\"))[-1] for title in titles]
    return short if len(set(short)) == len(short) else titles


def _notes(group: Group) -> Iterator[str]:
    """Series that lack targets of their N, and rows that do not end where the last budget does."""
    last = group.budgets[-1]
    targets: dict[int, set[str]] = defaultdict(set)
    for series in group.series:
        targets[series.prompt_length] |= {row.target_id for row in series.rows}
    for series in group.series:
        rows = series.rows
        ended = [row for row in rows if row.stop_reason == "budget" and last.axis == "step"]
        counts = {
            "were interrupted; they count with what they reached": sum(
                row.stop_reason == "interrupted" for row in rows
            ),
            f"had a budget of fewer than {last}; their last value is carried forward": sum(
                row.steps < last.at for row in ended
            ),
            f"found their prompt only beyond {last}; they count with what they had by then": sum(
                best_point(row, last).lcs < row.lcs for row in rows
            ),
        }
        place = f"{group.model}, {series.label}, N={series.prompt_length}"
        own, every = len({row.target_id for row in rows}), len(targets[series.prompt_length])
        if own < every:
            yield f"{place}: has {own} of {every} targets; its means are over those alone"
        yield from (f"{place}: {n} of {len(rows)} rows {what}" for what, n in counts.items() if n)
