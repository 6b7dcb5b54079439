"""Makes text of models safe for a terminal or a page: it may hold escape codes and markup."""

import html
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Protocol

from dlmi.metrics import lcs_members

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


class Decoder(Protocol):
    """Decodes tokens, as an LM does."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of token ids."""


def visible(text: str) -> str:
    r"""Text on one line, with control, format and bidi characters escaped.

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


def counted(count: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def token_texts(lm: Decoder, ids: Sequence[int]) -> list[str]:
    """The visible text of each token alone."""
    return [visible(lm.decode([token_id])) for token_id in ids]


def marked_markdown(lm: Decoder, target_ids: Sequence[int], output_ids: Sequence[int]) -> str:
    """An output in Markdown; tokens outside the LCS are bold and in brackets."""
    members = lcs_members(target_ids, output_ids)
    tokens = zip(token_texts(lm, output_ids), members, strict=True)
    return "".join(
        escape_markdown(token) if is_member else f"**[{escape_markdown(token)}]**"
        for token, is_member in tokens
    )


def escape_markdown(text: str) -> str:
    """Text escaped for Markdown and the HTML that it becomes.

    >>> escape_markdown("<b>|*")
    '&#60;b&#62;&#124;&#42;'
    """
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in visible(text))


def markdown_code(escaped: str) -> str:
    """Escaped text as code in Markdown; a space at either end is kept.

    >>> markdown_code(" a b")
    '<code>&#160;a b</code>'
    """
    return f"<code>{re.sub('^ | $', '&#160;', escaped)}</code>"


def html_code(text: str) -> str:
    """Text as HTML.

    >>> html_code("<b>")
    '<code style="white-space:pre-wrap">&lt;b&gt;</code>'
    """
    return f'<code style="white-space:pre-wrap">{html.escape(visible(text))}</code>'


def marked_html(tokens: Sequence[str], members: Sequence[bool]) -> str:
    """Tokens as HTML; those that are not `members` of the LCS are struck out in red."""
    return "".join(
        html_code(token) if is_member else f'<del style="color:#b00020">{html_code(token)}</del>'
        for token, is_member in zip(tokens, members, strict=True)
    )


def html_table(cells: Mapping[str, str]) -> str:
    """A table for notebooks: a name and a cell, which is HTML, in each row."""
    lines = (
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{cell}</td></tr>'
        for name, cell in cells.items()
    )
    return f"<table>{''.join(lines)}</table>"
