"""The tables of measurements: one line per LM, N and method, never averaged across LMs."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial

from dlmi.metrics import lcs_members
from dlmi.report.blocks import Cell, ModelText, ReportTable, block_texts, in_parts
from dlmi.report.estimates import Estimate, honest_lcs, mean_of, mean_over_targets, summarise
from dlmi.report.loading import Group, ReportData, Series, best_point
from dlmi.report.names import form_name
from dlmi.report.result_files import Budget
from dlmi.rows import DECODES, FLOORS, FORMS, Inversion

_METHODS_PER_TABLE = 6
_SHOWN_PROMPTS = 60


def group_table(data: ReportData) -> ReportTable:
    """What was measured: the LMs and target sets that all other tables keep apart."""
    lines = []
    for title, group in data.titled():
        rows = group.rows
        targets = {row.target_id: row for row in rows}
        line: dict[str, Cell] = {
            "name here": title,
            "LM": group.model,
            "revision": _joined({row.revision for row in rows}),
            "weights": group.fingerprint,
            "dtype": group.dtype,
            "target set": group.target_set,
            "targets": len(targets),
            "M": _joined(sorted({len(row.target_ids) for row in targets.values()})),
            "N": _joined(group.prompt_lengths),
            "seeds": len({row.seed for row in rows}),
            "rows": len(rows),
            "device": _joined({row.device for row in rows}),
            "made in several ways": group.mixed or None,
        }
        lines.append(line)
    return ReportTable.of("groups", lines, held=data.held_to)


def summary_table(data: ReportData) -> ReportTable:
    """The main numbers, at each budget."""
    lines = []
    for title, group, series in data.each():
        for budget in group.budgets:
            found = summarise(series, budget)
            passes = mean_of(found.token_passes)
            line: dict[str, Cell] = {
                **_place(title, series, budget=str(budget)),
                "targets": found.targets,
                "seeds": found.seeds,
                "exact": mean_of(found.exact),
                **_pair("honest LCS", "s.e.", found.lcs),
                "cross-entropy": mean_of(found.loss),
                **_pair("as-in-code LCS", "s.e. of it", found.as_in_code),
                "seconds": mean_of(found.seconds),
                "token passes": None if passes is None else round(passes),
            }
            lines.append(line)
    return ReportTable.of("summary", lines)


def lcs_matrix_table(data: ReportData) -> ReportTable:
    """LCS by form of the prompt and decode, with the floors below each LM and N."""
    lines: list[dict[str, Cell]] = []

    def add(
        place: dict[str, Cell], form: str, free: Estimate | None, forced: Estimate | None
    ) -> None:
        if free or forced:
            pairs = _pair("free greedy", "s.e.", free) | _pair(
                "teacher-forced", "s.e. of it", forced
            )
            lines.append({**place, "prompt": form_name(form), **pairs})

    for title, group, members in data.places():
        for series in members:
            for form in FORMS:
                free, forced = _by_decode(series.rows, form)
                if form == "best_so_far" and (free or forced):
                    free = mean_over_targets(series.rows, honest_lcs(group.budgets[-1]))
                if form not in FLOORS:
                    add(_place(title, series), form, free, forced)
        everyone = [row for series in members for row in series.rows]
        place: dict[str, Cell] = {"LM": title, "N": members[0].prompt_length, "method": "floor"}
        for form in FLOORS:
            add(place, form, *_by_decode(everyone, form))
        rate = mean_over_targets(everyone, lambda row: row.rank_one_rate)
        add(place, "rank-1 rate after BoS", None, rate)
    return ReportTable.of("lcs_matrix", lines)


def _by_decode(rows: Sequence[Inversion], form: str) -> list[Estimate | None]:
    return [mean_over_targets(rows, partial(matrix_lcs, form, decode)) for decode in DECODES]


def matrix_lcs(form: str, decode: str, row: Inversion) -> float | None:
    """LCS of a form of the prompt under a decode, where the row has it."""
    return row.lcs_matrix.get(form, {}).get(decode)


def overlap_table(data: ReportData) -> ReportTable:
    """What prompts share with their targets, and how unlikely they are."""
    lines = []
    for title, _, series in data.each():
        rows = series.rows
        overlap = mean_over_targets(rows, lambda row: row.overlap_ratio)
        hits = mean_over_targets(rows, lambda row: row.target_hit_ratio)
        logs = mean_over_targets(rows, log_perplexity)
        known = [row.prompt_perplexity or 0 for row in rows if log_perplexity(row) is not None]
        line: dict[str, Cell] = {
            **_place(title, series),
            **_pair("overlap", "s.e.", overlap),
            **_pair("target hit", "s.e. of it", hits),
            "perplexity (geometric mean)": math.exp(logs.mean) if logs else None,
            "perplexity (median)": statistics.median(known) if known else None,
        }
        lines.append(line)
    return ReportTable.of("overlap", lines)


def round_trip_table(data: ReportData) -> ReportTable:
    """Whether prompts survive as text: the honest LCS, and that less what a prompt loses in it."""
    lines = []
    for title, group, series in data.each():
        rows, budget = series.rows, group.budgets[-1]
        shares = mean_over_targets(rows, lambda row: float(row.round_trips))
        before = mean_over_targets(rows, honest_lcs(budget))
        after = mean_over_targets(rows, partial(_pasted_lcs, budget))
        line: dict[str, Cell] = {
            **_place(title, series),
            "prompts": len(rows),
            **_pair("encode back", "s.e.", shares),
            **_pair("LCS from ids", "s.e. from ids", before),
            **_pair("LCS from text", "s.e. from text", after),
        }
        lines.append(line)
    return ReportTable.of("round_trip", lines)


def _pasted_lcs(budget: Budget, row: Inversion) -> float:
    return best_point(row, budget).lcs - row.lcs + row.round_trip_lcs


def log_perplexity(row: Inversion) -> float | None:
    """Natural logarithm of the prompt's perplexity, where it has one."""
    value = row.prompt_perplexity
    return math.log(value) if value is not None and 0 < value < math.inf else None


def prompt_table(data: ReportData) -> ReportTable:
    """The prompts of the best method of each LM and N, the best seed of each target."""
    places = [(title, *_best_rows(group, members)) for title, group, members in data.places()]
    share = max(1, _SHOWN_PROMPTS // max(1, len(places)))
    lines = []
    for title, series, rows in places:
        count = min(share, len(rows))
        for row in (rows[i * len(rows) // count] for i in range(count)):
            # Tokens may be parts of characters: the whole text is shown where nothing is marked.
            members = lcs_members(row.target_ids, row.output_ids)
            output = zip(row.output_tokens, (not member for member in members), strict=True)
            line: dict[str, Cell] = {
                **_place(title, series),
                "target id": row.target_id,
                "k": row.k,
                "target": ModelText([(row.target_text, False)]),
                "prompt": ModelText([(row.prompt_text, False)]),
                "prompt perplexity": row.prompt_perplexity,
                "output": ModelText([(row.output_text, False)] if row.exact else output),
                "LCS": row.lcs,
                "seed": row.seed,
            }
            lines.append(line)
    count = sum(len(rows) for *_, rows in places) - len(lines)
    left_out = f" {count} further targets are left out, evenly over the difficulties."
    return ReportTable.of("prompts", lines, left_out=left_out if count else "")


def _best_rows(group: Group, members: Sequence[Series]) -> tuple[Series, list[Inversion]]:
    """The best series of an N, and its best row of each target, by difficulty."""
    honest = honest_lcs(group.budgets[-1])
    series = max(members, key=lambda each: mean_of(mean_over_targets(each.rows, honest)) or 0)
    ascending = sorted(series.rows, key=lambda row: (row.lcs, -row.discrete_loss))
    best = {row.target_id: row for row in ascending}
    return series, sorted(best.values(), key=lambda row: (row.k is None, row.k or 0, row.target_id))


def settings_tables(data: ReportData) -> list[ReportTable]:
    """All arguments of the methods, settings down and methods across."""
    rows: dict[str, list[Inversion]] = {}
    for _, _, series in data.each():
        rows.setdefault(series.label, []).extend(series.rows)
    tables = []
    for number, part in enumerate(in_parts(list(rows), _METHODS_PER_TABLE), start=1):
        names = dict.fromkeys(n for label in part for row in rows[label] for n in row.settings)
        methods = [_joined({row.method for row in rows[label]}) for label in part]
        lines: list[tuple[Cell, ...]] = [("method", *methods)]
        lines += [(name, *(_setting(rows[label], name) for label in part)) for name in names]
        texts = block_texts("settings", part=number)
        tables.append(ReportTable(*texts, ("setting", *part), tuple(lines)))
    return tables


def _setting(rows: Sequence[Inversion], name: str) -> Cell:
    found = {json.dumps(row.settings[name]) for row in rows if name in row.settings}
    values = sorted((json.loads(value) for value in found), key=str)
    return _joined([v if isinstance(v, str) else json.dumps(v) for v in values]) if found else None


def _place(title: str, series: Series, **more: Cell) -> dict[str, Cell]:
    return {"LM": title, "N": series.prompt_length, **more, "method": series.label}


def _pair(name: str, error_name: str, found: Estimate | None) -> dict[str, Cell]:
    return {name: mean_of(found), error_name: found.error if found else None}


def _joined(values: Iterable[object]) -> str:
    """The values in a line; those of a set sorted."""
    return ", ".join(sorted(map(str, values)) if isinstance(values, set) else map(str, values))
