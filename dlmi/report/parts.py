"""The parts of a report that files and page share."""

from dataclasses import dataclass

Cell = str | int | float | None


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
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
