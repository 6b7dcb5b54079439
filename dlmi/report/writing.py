"""Everything of a report but its page, on disk: pictures, tables, and the text that ties them."""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from dlmi.report.blocks import Cell, Figure, ModelText, ReportTable, format_cell
from dlmi.report.latex import latex_table
from dlmi.report.loading import ReportData
from dlmi.report.styles import Drawing, house_style
from dlmi.text import escape_markdown, visible
from dlmi.version import __version__

_DOTS_PER_INCH = 200

# What Markdown reads as more than a character. An underscore inside a word and brackets that no
# address follows are what they are.
_MARKUP = re.compile(r"[\\`*{}<>|~$&#!]|(?<!\w)_|_(?!\w)|\](?=\s*[(\[:])")

# What a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@")


def write_figures(folder: Path, drawings: Sequence[Drawing]) -> list[Figure]:
    """Each drawing as PNG, PDF and SVG, undated: the same data give the same files."""
    folder.mkdir(exist_ok=True)
    figures = []
    for drawing in drawings:
        with house_style(svg_salt=drawing.name):
            picture = io.StringIO()
            drawing.canvas.savefig(folder / f"{drawing.name}.png", dpi=_DOTS_PER_INCH)
            drawing.canvas.set_layout_engine("none")  # everything has its place by now
            drawing.canvas.savefig(picture, format="svg", metadata={"Date": None})
            dateless = {"CreationDate": None}
            drawing.canvas.savefig(folder / f"{drawing.name}.pdf", metadata=dateless)
        svg = picture.getvalue()
        (folder / f"{drawing.name}.svg").write_text(svg, encoding="utf-8", newline="\n")
        figures.append(Figure(drawing.name, drawing.title, drawing.caption, svg))
    return figures


def write_tables(folder: Path, tables: Sequence[ReportTable]) -> None:
    """Each table as Markdown, CSV and LaTeX."""
    folder.mkdir(exist_ok=True)
    for table in tables:
        texts = {"md": markdown_file(table), "csv": csv_table(table), "tex": latex_table(table)}
        for suffix, text in texts.items():
            _write(folder / f"{table.name}.{suffix}", text)


def write_text(
    path: Path, data: ReportData, figures: Sequence[Figure], tables: Sequence[ReportTable]
) -> None:
    """`report.md`: what was measured, what was wrong, then every figure and table."""
    lines = [
        "# Report",
        "",
        f"{len(data.rows)} results of {len(data.groups)} set{'s' * (len(data.groups) != 1)} of LM "
        f"and targets, written by dlmi {__version__}. Rows of different LMs, dtypes or target "
        "sets are never averaged together.",
        "",
        "## Notes",
        "",
        *([f"- {markdown_text(note)}" for note in data.notes] or ["Every line could be read."]),
        "",
        "## Figures",
        "",
    ]
    for figure in figures:
        links = " ".join(f"[{kind}](figures/{figure.name}.{kind})" for kind in ("pdf", "svg"))
        lines += [f"### {markdown_text(figure.title)}", ""]
        lines += [f"![{markdown_text(figure.title)}](figures/{figure.name}.png)", ""]
        lines += [f"{markdown_text(figure.caption)} ({links})", ""]
    lines += ["## Tables", ""]
    for table in tables:
        links = " ".join(f"[{kind}](tables/{table.name}.{kind})" for kind in ("csv", "tex"))
        lines += [f"### {markdown_text(table.title)}", ""]
        lines += [f"{markdown_text(table.caption)} ({links})", "", markdown_table(table), ""]
    _write(path, "\n".join(lines))


def markdown_file(table: ReportTable) -> str:
    """A table with its title and caption."""
    title, caption = markdown_text(table.title), markdown_text(table.caption)
    return f"# {title}\n\n{caption}\n\n{markdown_table(table)}\n"


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
    """Numbers in full, None empty, text on one line each."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_csv_cell, table.columns))
    writer.writerows([_csv_cell(cell) for cell in row] for row in table.rows)
    return file.getvalue()


def _csv_cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _reads_as_number(text) else text


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    # A file name that is not valid Unicode can stand in a note.
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
