"""Tables about the prompts that were found: what they are like, and the prompts themselves."""

import math
import statistics

from dlmi.metrics import lcs_members
from dlmi.report.estimates import mean_over_targets
from dlmi.report.loading import Group, Loaded, Series
from dlmi.report.naming import group_titles
from dlmi.report.parts import Cell, ModelText, ReportTable
from dlmi.report.tables import ERRORS, all_series, mean_and_error
from dlmi.rows import Inversion

_SHOWN_PROMPTS = 60


def prompt_table(loaded: Loaded) -> ReportTable:
    """The prompts of the best method of each LM and N, the best seed of each target."""
    places = []
    for name, group in zip(group_titles(loaded.groups), loaded.groups, strict=True):
        for length in group.prompt_lengths:
            best = _best_series(group, length)
            places.append((name, best, _best_rows(best)))
    share = max(1, _SHOWN_PROMPTS // max(1, len(places)))
    rows = [
        _prompt_cells(name, series, row)
        for name, series, found in places
        for row in _spread(found, share)
    ]
    left_out = sum(len(found) for *_, found in places) - len(rows)
    columns = (
        *("LM", "N", "method", "target id", "k", "target", "prompt", "prompt perplexity"),
        *("output", "LCS", "seed"),
    )
    caption = (
        "What was found by the method with the highest mean honest LCS of each LM and N: for each "
        "target the seed with the highest LCS, so this is a selection and no average. The output "
        "is the greedy decode of the prompt; its differences from the target (what is outside "
        "their longest common subsequence) are marked. ⏎ is a newline, ⇥ a tab, ␣ a space."
    )
    if left_out:
        caption += f" {left_out} further targets are left out, evenly over the difficulties."
    return ReportTable("prompts", "Prompts and outputs", caption, columns, tuple(rows))


def overlap_table(loaded: Loaded) -> ReportTable:
    """What prompts share with their targets, and how unlikely they are."""
    rows = []
    for name, _, series in all_series(loaded):
        overlap = mean_over_targets(series.rows, lambda row: row.overlap_ratio)
        hits = mean_over_targets(series.rows, lambda row: row.target_hit_ratio)
        logs = mean_over_targets(series.rows, log_perplexity)
        found = [row.prompt_perplexity for row in series.rows if log_perplexity(row) is not None]
        cells: tuple[Cell, ...] = (
            *(name, series.prompt_length, series.label),
            *(*mean_and_error(overlap), *mean_and_error(hits)),
            None if logs is None else math.exp(logs.mean),
            statistics.median(value for value in found if value is not None) if found else None,
        )
        rows.append(cells)
    columns = (
        *("LM", "N", "method", "overlap", "s.e.", "target hit", "s.e. of it"),
        *("perplexity (geometric mean)", "perplexity (median)"),
    )
    caption = (
        f"Of the best prompts. {ERRORS} Overlap: share of prompt positions that hold a token of "
        "the target; target hit: share of the target's distinct tokens that occur in the prompt; "
        "perplexity: of the prompt under the LM, from its second token on."
    )
    return ReportTable("overlap", "Overlap and perplexity", caption, columns, tuple(rows))


def round_trip_table(loaded: Loaded) -> ReportTable:
    """Whether prompts survive as text."""
    rows = []
    for name, _, series in all_series(loaded):
        shares = mean_over_targets(series.rows, lambda row: float(row.round_trips))
        before = mean_over_targets(series.rows, lambda row: row.lcs)
        after = mean_over_targets(series.rows, lambda row: row.round_trip_lcs)
        rows.append(
            (
                *(name, series.prompt_length, series.label, len(series.rows)),
                *(*mean_and_error(shares), *mean_and_error(before), *mean_and_error(after)),
            )
        )
    columns = (
        *("LM", "N", "method", "prompts", "encode back", "s.e.", "LCS from ids"),
        *("s.e. from ids", "LCS from text", "s.e. from text"),
    )
    caption = (
        f"Share of the best prompts whose text encodes to the same tokens again, and the honest "
        f"LCS before and after going through text. {ERRORS}"
    )
    return ReportTable("round_trip", "Round trip through text", caption, columns, tuple(rows))


def log_perplexity(row: Inversion) -> float | None:
    """Natural logarithm of the prompt's perplexity, where it has one."""
    value = row.prompt_perplexity
    return math.log(value) if value is not None and 0 < value < math.inf else None


def _best_series(group: Group, length: int) -> Series:
    members = [series for series in group.series if series.prompt_length == length]

    def mean_lcs(series: Series) -> float:
        return statistics.fmean(row.lcs for row in series.rows)

    return max(members, key=mean_lcs)


def _best_rows(series: Series) -> list[Inversion]:
    """The best row of each target, by difficulty."""
    best: dict[str, Inversion] = {}
    for row in sorted(series.rows, key=lambda row: (row.lcs, -row.discrete_loss)):
        best[row.target_id] = row
    return sorted(best.values(), key=lambda row: (row.k is None, row.k or 0, row.target_id))


def _spread(rows: list[Inversion], count: int) -> list[Inversion]:
    """So many of them, evenly."""
    return [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else rows


def _prompt_cells(name: str, series: Series, row: Inversion) -> tuple[Cell, ...]:
    members = lcs_members(row.target_ids, row.output_ids)
    # Tokens may be parts of characters: the text as a whole is shown where nothing is marked.
    output = [(token, not is_in) for token, is_in in zip(row.output_tokens, members, strict=True)]
    return (
        *(name, series.prompt_length, series.label, row.target_id, row.k),
        *(ModelText([(row.target_text, False)]), ModelText([(row.prompt_text, False)])),
        row.prompt_perplexity,
        ModelText([(row.output_text, False)]) if row.exact else ModelText(output),
        *(row.lcs, row.seed),
    )
