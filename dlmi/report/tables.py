"""Tables of results: one line per LM, N and method, never averaged across LMs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from dlmi.metrics import lcs_members
from dlmi.report.blocks import Cell, ModelText, ReportTable, block_texts, in_parts
from dlmi.report.estimates import Measure, honest_lcs, known, mean_over_targets, summarise
from dlmi.report.loading import Group, ReportData, Series, every_value
from dlmi.report.names import form_name
from dlmi.rows import DECODES, FLOORS, FORMS, Inversion

_METHODS_PER_TABLE = 6
_SHOWN_PROMPTS = 60

Line = dict[str, Cell]


def group_table(data: ReportData) -> ReportTable:
    """The LMs and target sets that all other tables keep apart."""
    lines: list[Line] = [
        {
            "name here": group.title,
            "LM": group.model,
            "revision": _joined({row.revision for row in group.rows}),
            "weights": group.fingerprint,
            "dtype": group.dtype,
            "target set": group.target_set,
            "targets": len({row.target_id for row in group.rows}),
            "M": _joined(sorted({len(row.target_ids) for row in group.rows})),
            "N": _joined(group.prompt_lengths),
            "seeds": len({row.seed for row in group.rows}),
            "rows": len(group.rows),
            "device": _joined({row.device for row in group.rows}),
            "made in several ways": group.mixed or None,
        }
        for group in data.groups
    ]
    return ReportTable.of("groups", lines, held=data.held_to)


def summary_table(data: ReportData) -> ReportTable:
    """The main numbers, at each budget."""
    lines = []
    for group, series in data.each():
        for budget in group.budgets:
            found = summarise(series, budget)
            line: Line = {
                **_place(group, series, budget=str(budget)),
                "targets": found.lcs.targets,
                "seeds": len({row.seed for row in series.rows}),
                "exact": found.exact.mean,
                "honest LCS": found.lcs.mean,
                "s.e.": found.lcs.error,
                "cross-entropy": found.loss.mean,
                "as-in-code LCS": found.as_in_code.mean,
                "s.e. of it": found.as_in_code.error,
                "seconds": found.seconds.mean,
                "token passes": round(found.token_passes.mean),
            }
            lines.append(line)
    return ReportTable.of("summary", lines)


def lcs_matrix_table(data: ReportData) -> ReportTable:
    """LCS by form of the prompt and decode, with the floors below each LM and N."""
    lines: list[Line] = []

    def add(group: Group, series: Series, prompt: str, free: Measure, forced: Measure) -> None:
        measures = {("free greedy", "s.e."): free, ("teacher-forced", "s.e. of it"): forced}
        means = _means(series.rows, measures)
        lines.append({**_place(group, series), "prompt": prompt, **means})

    for group, members in data.places():
        rows = tuple(row for series in members for row in series.rows)
        floor = Series("floor", members[0].prompt_length, rows)
        forms = [(series, form) for series in members for form in FORMS if form not in FLOORS]
        for series, form in [*forms, *((floor, form) for form in FLOORS)]:
            free, forced = (partial(matrix_lcs, form, decode) for decode in DECODES)
            honest = honest_lcs(group.budgets[-1]) if form == "best_so_far" else free
            if any(form in row.lcs_matrix for row in series.rows):
                add(group, series, form_name(form), honest, forced)
        if any(row.rank_one_rate is not None for row in rows):
            nothing, rate = lambda _: math.nan, lambda row: known(row.rank_one_rate)
            add(group, floor, "rank-1 rate after BoS", nothing, rate)
    return ReportTable.of("lcs_matrix", lines)


def matrix_lcs(form: str, decode: str, row: Inversion) -> float:
    """LCS of a form of the prompt under a decode; NaN where the row has none."""
    return row.lcs_matrix.get(form, {}).get(decode, math.nan)


def overlap_table(data: ReportData) -> ReportTable:
    """How much prompts share with their targets, and their perplexity."""
    measures: dict[tuple[str, str], Measure] = {
        ("overlap", "s.e."): lambda row: row.overlap_ratio,
        ("target hit", "s.e. of it"): lambda row: row.target_hit_ratio,
    }
    lines = []
    for group, series in data.each():
        logs = mean_over_targets(series.rows, log_perplexity)
        finite = [r.prompt_perplexity or 0 for r in series.rows if log_perplexity(r) < math.inf]
        line: Line = {
            **_place(group, series),
            **_means(series.rows, measures),
            "perplexity (geometric mean)": math.exp(logs.mean) if logs else None,
            "perplexity (median)": statistics.median(finite) if finite else None,
        }
        lines.append(line)
    return ReportTable.of("overlap", lines)


def log_perplexity(row: Inversion) -> float:
    """Natural logarithm of the prompt's perplexity; NaN or infinite where it has none."""
    value = known(row.prompt_perplexity)
    return math.log(value) if value > 0 else math.nan


def round_trip_table(data: ReportData) -> ReportTable:
    """Whether prompts survive as text: the honest LCS before and after a round trip."""
    lines = []
    for group, series in data.each():
        honest = honest_lcs(group.budgets[-1])
        measures: dict[tuple[str, str], Measure] = {
            ("encode back", "s.e."): lambda row: float(row.round_trips),
            ("LCS from ids", "s.e. from ids"): honest,
            ("LCS from text", "s.e. from text"): partial(_lcs_from_text, honest),
        }
        means = _means(series.rows, measures)
        lines.append({**_place(group, series), "prompts": len(series.rows), **means})
    return ReportTable.of("round_trip", lines)


def _lcs_from_text(honest: Measure, row: Inversion) -> float:
    return honest(row) - row.lcs + row.round_trip_lcs


def prompt_table(data: ReportData) -> ReportTable:
    """The prompts of the best method of each LM and N, the best seed of each target."""
    places = [(group, *_best_rows(group, members)) for group, members in data.places()]
    share = max(1, _SHOWN_PROMPTS // max(1, len(places)))
    lines = []
    for group, series, rows in places:
        count = min(share, len(rows))
        for row in (rows[i * len(rows) // count] for i in range(count)):
            # Tokens may be parts of characters, so the whole text is shown if nothing is marked.
            members = lcs_members(row.target_ids, row.output_ids)
            output = zip(row.output_tokens, (not member for member in members), strict=True)
            line: Line = {
                **_place(group, series),
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
    series = max(members, key=lambda each: mean_over_targets(each.rows, honest).mean)
    ascending = sorted(series.rows, key=lambda row: (row.lcs, -row.discrete_loss))
    best = {row.target_id: row for row in ascending}
    return series, sorted(best.values(), key=lambda row: (row.k is None, row.k or 0, row.target_id))


def settings_tables(data: ReportData) -> list[ReportTable]:
    """The settings of all methods: one line per setting, one column per method."""
    values = {
        label: every_value(
            {"method": row.method, **row.settings}
            for _, series in data.each()
            for row in series.rows
            if series.label == label
        )
        for label in data.labels
    }
    tables = []
    for number, part in enumerate(in_parts(data.labels, _METHODS_PER_TABLE), start=1):
        names = dict.fromkeys(name for label in part for name in values[label])
        lines = [
            (n, *(", ".join(values[label].get(n, [])) or None for label in part)) for n in names
        ]
        texts = block_texts("settings", part=number)
        tables.append(ReportTable(*texts, ("setting", *part), tuple(lines)))
    return tables


def _place(group: Group, series: Series, **more: Cell) -> Line:
    return {"LM": group.title, "N": series.prompt_length, **more, "method": series.label}


def _means(rows: Sequence[Inversion], measures: Mapping[tuple[str, str], Measure]) -> Line:
    """The mean of each measure and its standard error, by their headings."""
    line: Line = {}
    for (name, error_name), measure in measures.items():
        found = mean_over_targets(rows, measure)
        line |= {name: found.mean, error_name: found.error}
    return line


def _joined(values: Iterable[object]) -> str:
    """The values with commas between them; those of a set sorted."""
    return ", ".join(sorted(map(str, values)) if isinstance(values, set) else map(str, values))
