"""The tables of measurements: one line per LM, N and method, never averaged across LMs."""

import json
from collections.abc import Iterator, Sequence

from dlmi.report.estimates import (
    Estimate,
    Measure,
    as_in_code_lcs,
    honest_lcs,
    mean_over_targets,
)
from dlmi.report.loading import Axis, Group, Loaded, Series, best_point, last_point
from dlmi.report.naming import budget_name, form_name, group_titles
from dlmi.report.parts import Cell, ReportTable
from dlmi.rows import DECODES, FLOORS, FORMS, Inversion

_METHODS_PER_TABLE = 6

ERRORS = "Means over targets, seeds averaged first; s.e.: standard error over targets."


def group_table(loaded: Loaded) -> ReportTable:
    """What was measured: the LMs and target sets that all other tables keep apart."""
    rows = []
    for name, group in zip(group_titles(loaded.groups), loaded.groups, strict=True):
        found = group.rows
        targets = {row.target_id: row for row in found}
        lengths = sorted({len(row.target_ids) for row in targets.values()})
        cells: tuple[Cell, ...] = (
            *(name, group.model, _joined({row.revision for row in found}), group.fingerprint),
            *(group.dtype, group.target_set, len(targets), _joined(lengths)),
            *(_joined(group.prompt_lengths), len({row.seed for row in found}), len(found)),
            _joined({row.device for row in found}),
        )
        rows.append(cells)
    columns = (
        *("name here", "LM", "revision", "weights", "dtype", "target set", "targets", "M", "N"),
        *("seeds", "rows", "device"),
    )
    caption = "Each line is shown apart in everything that follows."
    return ReportTable("groups", "What was measured", caption, columns, tuple(rows))


def summary_table(loaded: Loaded) -> ReportTable:
    """The main numbers, at each budget."""
    rows = []
    for name, group, series in all_series(loaded):
        axis, budgets = group.budgets
        for at in budgets:
            place = (name, series.prompt_length, budget_name(axis, at), series.label)
            rows.append((*place, *_summary_cells(series.rows, axis, at)))
    columns = (
        *("LM", "N", "budget", "method", "targets", "seeds", "exact", "honest LCS", "s.e."),
        *("cross-entropy", "as-in-code LCS", "s.e. of it", "seconds", "token passes"),
    )
    caption = (
        f"{ERRORS} Exact, honest LCS and cross-entropy (teacher-forced, per token) are of the "
        "best discrete prompt within the budget under a free greedy decode. The as-in-code LCS is "
        "of the relaxed prompt under the training decode at the last evaluation, as the DLMI "
        "authors' code logs it; it is no prompt that could be typed. Seconds are spent in a slot, "
        "beside its batch mates."
    )
    return ReportTable("summary", "Results by method", caption, columns, tuple(rows))


def _summary_cells(rows: Sequence[Inversion], axis: Axis, at: float) -> tuple[Cell, ...]:
    def mean(measure: Measure) -> Estimate | None:
        return mean_over_targets(rows, measure)

    exact = mean(lambda row: float(best_point(row, axis, at).lcs == 1))
    loss = mean(lambda row: best_point(row, axis, at).discrete_loss)
    seconds = mean(lambda row: last_point(row, axis, at).seconds)
    passes = mean(lambda row: last_point(row, axis, at).token_passes)
    return (
        *(len({row.target_id for row in rows}), len({row.seed for row in rows})),
        *(_mean(exact), *mean_and_error(mean(honest_lcs(axis, at))), _mean(loss)),
        *mean_and_error(mean(as_in_code_lcs(axis, at))),
        *(_mean(seconds), None if passes is None else round(passes.mean)),
    )


def lcs_matrix_table(loaded: Loaded) -> ReportTable:
    """LCS by form of the prompt and decode, with the floors below each LM and N."""
    rows: list[tuple[Cell, ...]] = []
    for name, group in zip(group_titles(loaded.groups), loaded.groups, strict=True):
        for length in group.prompt_lengths:
            members = [series for series in group.series if series.prompt_length == length]
            for series in members:
                for form in FORMS:
                    if form not in FLOORS:
                        rows += _form_cells((name, length, series.label), series.rows, form)
            everyone = [row for series in members for row in series.rows]
            for form in FLOORS:
                rows += _form_cells((name, length, "floor"), everyone, form)
            rate = mean_over_targets(everyone, lambda row: row.rank_one_rate)
            if rate is not None:
                cells = (name, length, "floor", "rank-1 rate after BoS")
                rows.append((*cells, None, None, *mean_and_error(rate)))
    columns = (
        *("LM", "N", "method", "prompt", "free greedy", "s.e.", "teacher-forced"),
        "s.e. of it",
    )
    caption = (
        f"LCS by form of the prompt and by decode, at the end of each target's run. {ERRORS} "
        "Best so far under the free greedy decode is the honest LCS; all other forms are of the "
        "last step. A Gumbel sample under teacher forcing is what the DLMI authors' code logs for "
        "DLMI. Floors are over all rows of that N; the rank-1 rate is the share of target tokens "
        "that the LM puts first given BoS and the true tokens before: what teacher forcing gets "
        "right without any prompt."
    )
    return ReportTable("lcs_matrix", "LCS by prompt and decode", caption, columns, tuple(rows))


def settings_tables(loaded: Loaded) -> list[ReportTable]:
    """All arguments of the methods, settings down and methods across."""
    rows: dict[str, list[Inversion]] = {}
    for _, _, series in all_series(loaded):
        rows.setdefault(series.label, []).extend(series.rows)
    labels = list(rows)
    parts = [labels[i : i + _METHODS_PER_TABLE] for i in range(0, len(labels), _METHODS_PER_TABLE)]
    tables = []
    for number, part in enumerate(parts):
        names = dict.fromkeys(
            name for label in part for row in rows[label] for name in row.settings
        )
        lines: list[tuple[Cell, ...]] = [
            ("method", *(_joined({row.method for row in rows[label]}) for label in part))
        ]
        lines += [(name, *(_setting(rows[label], name) for label in part)) for name in names]
        suffix = "" if len(parts) == 1 else f"_{number + 1}"
        title = "Settings of the methods" + (f", part {number + 1}" if suffix else "")
        caption = "Every argument of each method; several values where its runs differ."
        table = ReportTable(f"settings{suffix}", title, caption, ("setting", *part), tuple(lines))
        tables.append(table)
    return tables


def all_series(loaded: Loaded) -> Iterator[tuple[str, Group, Series]]:
    """Every series with its group and what that is called, by N."""
    for name, group in zip(group_titles(loaded.groups), loaded.groups, strict=True):
        for length in group.prompt_lengths:
            for series in group.series:
                if series.prompt_length == length:
                    yield name, group, series


def _form_cells(
    place: tuple[Cell, ...], rows: Sequence[Inversion], form: str
) -> list[tuple[Cell, ...]]:
    """One line, or none where no row has the form."""

    def measure(decode: str) -> Measure:
        return lambda row: row.lcs_matrix.get(form, {}).get(decode)

    estimates = [mean_over_targets(rows, measure(decode)) for decode in DECODES]
    if not any(estimates):
        return []
    return [(*place, form_name(form), *(x for e in estimates for x in mean_and_error(e)))]


def _mean(found: Estimate | None) -> Cell:
    return None if found is None else found.mean


def mean_and_error(found: Estimate | None) -> tuple[Cell, Cell]:
    """Two cells."""
    return (None, None) if found is None else (found.mean, found.error)


def _setting(rows: Sequence[Inversion], name: str) -> Cell:
    found = {json.dumps(row.settings[name]) for row in rows if name in row.settings}
    values = sorted((json.loads(value) for value in found), key=str)
    return _joined([v if isinstance(v, str) else json.dumps(v) for v in values]) if found else None


def _joined(values: "set[str] | set[str | None] | Sequence[object]") -> str:
    ordered = sorted(map(str, values)) if isinstance(values, set) else map(str, values)
    return ", ".join(ordered)
