"""The parts of a report that files and page share."""

from collections.abc import Iterable
from dataclasses import dataclass

from dlmi.text import visible

Cell = str | int | float | None


class ModelText(str):
    r"""Text that an LM read or said, legible on one line: never to be shown without escaping.

    As a plain string it has every character of the text, control characters spelled out and
    spaces visible.

    Attributes:
        parts: Its tokens, each with whether it is to be marked as wrong.

    >>> text = ModelText([("to be", False), ("\n", True)])
    >>> text, text.parts
    ('to␣be⏎', (('to␣be', False), ('⏎', True)))
    """

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> "ModelText":
        """From raw tokens."""
        shown = tuple((visible(text).replace(" ", "␣"), is_wrong) for text, is_wrong in parts)
        made = super().__new__(cls, "".join(text for text, _ in shown))
        made.parts = shown
        return made


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        name: Of its files, without suffix.
        title: A few words.
        caption: What is shown, how it was measured, over how many targets and seeds.
        svg: The picture itself, self-contained.
    """

    name: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class ReportTable:
    """A table.

    Attributes:
        name: Of its files, without suffix.
        title: A few words.
        caption: What is shown and how it was measured.
        columns: Names of the columns, units included.
        rows: Plain cells; floats are formatted by whoever shows them, None is shown as a dash.
            Text of models is `ModelText`.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
