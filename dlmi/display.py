"""Model text made safe and legible for a terminal or a page.

Models say anything, escape codes and markup included, so nothing they say is shown raw.
"""

import statistics
import unicodedata
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dlmi.lm import FrozenLM
from dlmi.metrics import lcs_members
from dlmi.results import Inversion

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def visible(text: str) -> str:
    r"""Text on one line, with control, format and bidi characters spelled out.

    >>> visible("a\nb\x1b[31m")
    'a⏎b\\x1b[31m'
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if unicodedata.category(character)[0] in "CZ" and character != " ":
        return character.encode("unicode_escape").decode()
    return character


def clock(seconds: float) -> str:
    """A duration.

    >>> clock(3725), clock(200000)
    ('1:02:05', '2 d 7 h')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour} h" if days else f"{hour}:{minute:02}:{second:02}"


def token_texts(lm: FrozenLM, ids: Sequence[int]) -> list[str]:
    """The text of each token alone, visible."""
    return [visible(lm.decode([token_id])) for token_id in ids]


def marked_output(lm: FrozenLM, target_ids: Sequence[int], output_ids: Sequence[int]) -> Text:
    """An output for the terminal: what belongs to the LCS green, the rest red."""
    text = Text()
    members = lcs_members(target_ids, output_ids)
    for token, is_member in zip(token_texts(lm, output_ids), members, strict=True):
        text.append(token, style="green" if is_member else "red")
    return text


def marked_markdown(lm: FrozenLM, target_ids: Sequence[int], output_ids: Sequence[int]) -> str:
    """An output for a Markdown page: what belongs to the LCS plain, the rest bold in brackets."""
    members = lcs_members(target_ids, output_ids)
    tokens = zip(token_texts(lm, output_ids), members, strict=True)
    return "".join(
        escape_markdown(token) if is_member else f"**[{escape_markdown(token)}]**"
        for token, is_member in tokens
    )


def escape_markdown(text: str) -> str:
    """Text that Markdown (and the HTML it becomes) shows as it is.

    >>> escape_markdown("<b>|*")
    '&#60;b&#62;&#124;&#42;'
    """
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in visible(text))


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
