"""Everything of a report but its page, on disk: pictures, tables, and the text that ties them."""

import csv
import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path

from dlmi.report.blocks import Cell, Figure, ModelText, ReportTable, format_cell, render
from dlmi.report.latex import latex_table
from dlmi.report.loading import ReportData
from dlmi.report.styles import house_style
from dlmi.text import escape_markdown, visible
from dlmi.version import __version__

_DOTS_PER_INCH = 200

# What Markdown reads as more than a character. An underscore inside a word and brackets that no
# address follows are what they are.
_MARKUP = re.compile(r"[\\`*{}<>|~$&#!]|(?<!\w)_|_(?!\w)|\](?=\s*[(\[:])")

# What a spreadsheet would take for a formula, unless it is a number.
_FORMULA = re.compile(r"[=@]|[+-](?!\d+(\.\d+)?(e[+-]?\d+)?$)")


def write_figures(folder: Path, drawings: Sequence[Figure]) -> list[Figure]:
    """Each drawing as PNG, PDF and SVG, undated: the same data give the same files."""
    folder.mkdir(exist_ok=True)
    figures = []
    for drawing in drawings:
        file = folder / drawing.name
        with house_style(svg_salt=drawing.name):
            picture = io.StringIO()
            drawing.canvas.savefig(f"{file}.png", dpi=_DOTS_PER_INCH)
            drawing.canvas.set_layout_engine("none")  # everything has its place by now
            drawing.canvas.savefig(picture, format="svg", metadata={"Date": None})
            drawing.canvas.savefig(f"{file}.pdf", metadata={"CreationDate": None})
        _write(Path(f"{file}.svg"), picture.getvalue())
        figures.append(dataclasses.replace(drawing, svg=picture.getvalue()))
    return figures


def write_tables(folder: Path, tables: Sequence[ReportTable]) -> None:
    """Each table as Markdown, CSV and LaTeX."""
    folder.mkdir(exist_ok=True)
    for table in tables:
        title, caption = markdown_text(table.title), markdown_text(table.caption)
        markdown = f"# {title}\n\n{caption}\n\n{markdown_table(table)}\n"
        texts = {"md": markdown, "csv": csv_table(table), "tex": latex_table(table)}
        for suffix, text in texts.items():
            _write(folder / f"{table.name}.{suffix}", text)


def write_text(
    path: Path, data: ReportData, figures: Sequence[Figure], tables: Sequence[ReportTable]
) -> None:
    """`report.md`: what was measured, what was wrong, then every figure and table."""
    blocks = {"data": data, "figures": figures, "tables": tables, "version": __version__}
    filters = {"md": markdown_text, "md_table": markdown_table}
    _write(path, render("report.md.j2", filters, **blocks))


def markdown_table(table: ReportTable) -> str:
    """Only the table: numbers to the right."""
    lines = [
        [markdown_text(column) for column in table.columns],
        ["---:" if table.is_number(i) else "---" for i in range(len(table.columns))],
        *([markdown_cell(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_cell(value: Cell) -> str:
    """A cell; what a model got wrong is bold in brackets."""
    if not isinstance(value, ModelText):
        return markdown_text(format_cell(value))
    parts = [(escape_markdown(text), is_wrong) for text, is_wrong in value.parts]
    # Asterisks would not do: within a word Markdown shows them before a bracket.
    text = "".join(f"<b>[{shown}]</b>" if is_wrong else shown for shown, is_wrong in parts)
    # Two marked tokens in a row are one marked piece, and a line may break after a space.
    return text.replace("]</b><b>[", "").replace(escape_markdown("␣"), "␣<wbr>")


def markdown_text(text: str) -> str:
    r"""Text of our own, with names of the user's in it, on one line.

    >>> markdown_text("a_b <c> [d](e)\n")
    'a_b &#60;c&#62; [d&#93;(e)⏎'
    """
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", visible(text))


def csv_table(table: ReportTable) -> str:
    """Numbers in full, None empty, text on one line each, formulas quoted."""
    file = io.StringIO()
    rows = (map(_csv_cell, row) for row in (table.columns, *table.rows))
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _csv_cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if _FORMULA.match(text) else text


def _write(path: Path, text: str) -> None:
    # A file name that is not valid Unicode can stand in a note.
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
