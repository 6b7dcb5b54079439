"""What files and page are put together from: tables, figures, and text that a model said."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlmi.text import visible

Cell = str | int | float | None


class ModelText(str):
    r"""Text that an LM read or said, legible on one line: never to be shown without escaping.

    As a plain string it has every character of the text, control characters spelled out and
    spaces visible; `parts` are its tokens, each with whether it is to be marked as wrong.

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
    """A picture, as self-contained SVG; `name` is that of its files, without suffix."""

    name: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class ReportTable:
    """A table; `name` is that of its files, without suffix.

    Cells are plain: floats are formatted by whoever shows them, None is shown as a dash. Text of
    models is `ModelText`.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(
        cls, name: str, title: str, caption: str, lines: Sequence[Mapping[str, Cell]]
    ) -> "ReportTable":
        """From lines that all have the same columns."""
        columns = tuple(lines[0]) if lines else ()
        return cls(name, title, caption, columns, tuple(tuple(line.values()) for line in lines))

    def is_number(self, column: int) -> bool:
        """Whether a column holds nothing but numbers, which stand to the right."""
        return all(isinstance(row[column], int | float | None) for row in self.rows)


def format_cell(value: Cell) -> str:
    """A cell of a table as it is shown.

    >>> [format_cell(value) for value in (0.12345, 12345, 1234.5, 3e-5, "a")]
    ['0.123', '12,345', '1,234.5', '3e-05', 'a']
    """
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return visible(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e9):
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"
