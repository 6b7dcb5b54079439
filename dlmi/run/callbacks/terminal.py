"""What a terminal shows of results: outputs marked by what is right, a table per difficulty."""

import statistics
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dlmi.metrics import lcs_members
from dlmi.rows import Inversion
from dlmi.text import Decoder, token_texts


def marked_output(lm: Decoder, target_ids: Sequence[int], output_ids: Sequence[int]) -> Text:
    """An output for the terminal: what belongs to the LCS green, the rest red."""
    text = Text()
    members = lcs_members(target_ids, output_ids)
    for token, is_member in zip(token_texts(lm, output_ids), members, strict=True):
        text.append(token, style="green" if is_member else "red")
    return text


def summary_table(rows: Sequence[Inversion]) -> Table:
    """Per difficulty: targets, exact, mean honest LCS; median steps, cost and seconds in a slot."""
    title = "Honest results: discrete prompt, free greedy decode (steps and on: medians)"
    table = Table(title=title, title_justify="left")
    names = ("k", "targets", "exact", "mean LCS", "as in code", "steps", "token passes", "seconds")
    for name in names:
        table.add_column(name, justify="right")
    groups = sorted({row.k for row in rows}, key=lambda k: (k is None, k))
    for k in groups:
        table.add_row("-" if k is None else str(k), *_cells([r for r in rows if r.k == k]))
    if len(groups) > 1:
        table.add_section()
        table.add_row("all", *_cells(rows))
    return table


def _cells(rows: Sequence[Inversion]) -> list[str]:
    soft = [row.as_in_code_lcs for row in rows if row.as_in_code_lcs is not None]
    return [
        str(len(rows)),
        str(sum(row.exact for row in rows)),
        f"{statistics.mean(row.lcs for row in rows):.3f}",
        f"{statistics.mean(soft):.3f}" if soft else "-",
        f"{statistics.median(row.steps for row in rows):g}",
        f"{statistics.median(row.forward_tokens + row.backward_tokens for row in rows):,.0f}",
        f"{statistics.median(row.seconds for row in rows):.0f}",
    ]
