"""The files of a report except its page: figures, tables and `report.md`.

Cells are escaped for each format, so that no text becomes Markdown, a formula or a LaTeX command.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from dlmi.report.blocks import Cell, Figure, ModelText, ReportTable, format_cell, render, write_file
from dlmi.report.loading import ReportData
from dlmi.report.styles import house_style
from dlmi.text import escape_markdown, visible
from dlmi.version import __version__

_DOTS_PER_INCH = 300

# What Markdown takes for markup. It leaves alone an underscore inside a word, and brackets without
# an address after them.
_MARKUP = re.compile(r"[\\`*{}<>|~$&#!]|(?<!\w)_|_(?!\w)|\](?=\s*[(\[:])")

# What a spreadsheet takes for a formula; a signed number is none.
_FORMULA = re.compile(r"[=@]|[+-](?!\d+(\.\d+)?(e[+-]?\d+)?$)")

_LONGEST_FLOAT = 40  # rows; a longer table breaks over pages, which tabular cannot
_LONGEST_PLAIN_CELL = 26  # characters
_MOST_UPRIGHT_COLUMNS = 7

_TEXT_COMMANDS = {
    **{"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater"},
    **{"|": "bar", '"': "quotedbl", "`": "asciigrave", "'": "quotesingle"},
}
_ESCAPES: dict[str, str | int | None] = {
    **{character: f"\\{character}" for character in "{}$&#%"},
    # After a line's end the first two would be arguments of it; two hyphens would be a dash.
    **{character: f"{{{character}}}" for character in "[*-"},
    **{character: rf"\text{name}{{}}" for character, name in _TEXT_COMMANDS.items()},
    "_": r"\_\allowbreak{}",
    "⏎": r"$\hookleftarrow$",
    "⇥": r"\texttt{\textbackslash{}t}",
    "␍": r"\texttt{\textbackslash{}r}",
    "␣": r"\textvisiblespace\allowbreak{}",
    "τ": r"$\tau$",
}
_BEYOND_FONTS = re.compile("[^\x00-\x7f¡-ÿ–…]")  # noqa: RUF001 (LaTeX knows Latin-1 and these)


def write_figures(folder: Path, figures: Sequence[Figure]) -> None:
    """Write each as PNG, PDF and SVG, without a date: the same data give the same files."""
    folder.mkdir(exist_ok=True)
    for figure in figures:
        file, canvas, picture = folder / figure.name, figure.canvas, io.StringIO()
        with house_style(svg_salt=figure.name):
            canvas.savefig(f"{file}.png", dpi=_DOTS_PER_INCH)
            canvas.set_layout_engine("none")  # keeps the layout that was just made
            canvas.savefig(picture, format="svg", metadata={"Date": None})
            canvas.savefig(f"{file}.pdf", metadata={"CreationDate": None})
        figure.svg = picture.getvalue()
        write_file(Path(f"{file}.svg"), figure.svg)


def write_tables(folder: Path, tables: Sequence[ReportTable]) -> None:
    """Each table as Markdown, CSV and LaTeX."""
    folder.mkdir(exist_ok=True)
    for table in tables:
        title, caption = markdown_text(table.title), markdown_text(table.caption)
        markdown = f"# {title}\n\n{caption}\n\n{markdown_table(table)}\n"
        texts = {"md": markdown, "csv": csv_table(table), "tex": latex_table(table)}
        for suffix, text in texts.items():
            write_file(folder / f"{table.name}.{suffix}", text)


def write_text(
    path: Path, data: ReportData, figures: Sequence[Figure], tables: Sequence[ReportTable]
) -> None:
    """Write `report.md`: notes, then every figure and table."""
    filters = {"md": markdown_text, "md_table": markdown_table}
    values = {"data": data, "figures": figures, "tables": tables, "version": __version__}
    write_file(path, render("report.md.j2", filters, **values))


def markdown_table(table: ReportTable) -> str:
    """The table without title and caption; numbers are aligned to the right."""
    lines = [
        [markdown_text(column) for column in table.columns],
        ["---:" if table.is_number(i) else "---" for i in range(len(table.columns))],
        *([markdown_cell(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_cell(value: Cell) -> str:
    """A cell; wrong tokens are bold in brackets."""
    if not isinstance(value, ModelText):
        return markdown_text(format_cell(value))
    parts = [(escape_markdown(text), is_wrong) for text, is_wrong in value.parts]
    # Within a word, Markdown does not take asterisks before a bracket for markup.
    text = "".join(f"<b>[{shown}]</b>" if is_wrong else shown for shown, is_wrong in parts)
    # Join neighbouring wrong tokens, and let a line break after a space.
    return text.replace("]</b><b>[", "").replace(escape_markdown("␣"), "␣<wbr>")


def markdown_text(text: str) -> str:
    r"""Titles, captions, labels and notes on one line, without active markup.

    >>> markdown_text("a_b <c> [d](e)\n")
    'a_b &#60;c&#62; [d&#93;(e)⏎'
    """
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", visible(text))


def csv_table(table: ReportTable) -> str:
    """Numbers in full, None and NaN empty, each text on one line, formulas quoted."""

    def shown(value: Cell) -> Cell:
        if not isinstance(value, str):
            return None if value != value else value
        text = visible(value)
        return f"'{text}" if _FORMULA.match(text) else text

    file = io.StringIO()
    rows = (map(shown, row) for row in (table.columns, *table.rows))
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def escape_latex(text: str) -> str:
    r"""Text that LaTeX shows literally; characters that its fonts lack as their code point.

    >>> escape_latex("a_b & 50%") == r"a\_\allowbreak{}b \& 50\%"
    True
    """
    shown = visible(text).translate(str.maketrans(_ESCAPES))
    return _BEYOND_FONTS.sub(lambda found: rf"\texttt{{U+{ord(found[0]):04X}}}", shown)


def latex_cell(value: Cell) -> str:
    """A cell; wrong tokens are red."""
    if isinstance(value, ModelText):
        parts = [(escape_latex(text), is_wrong) for text, is_wrong in value.parts]
        return "".join(rf"\textcolor{{red}}{{{t}}}" if wrong else t for t, wrong in parts)
    shown = format_cell(value)
    if not isinstance(value, int | float):
        return escape_latex(shown)
    mantissa, has_exponent, exponent = shown.partition("e")
    if has_exponent:
        return rf"${mantissa}\times10^{{{int(exponent)}}}$"
    return shown.replace("-", "$-$")


def latex_table(table: ReportTable) -> str:
    """A LaTeX file: a float, or a longtable if it has many rows."""
    return render(
        "table.tex.j2",
        {"latex": latex_cell},
        table=table,
        layout=_layout(table),
        is_long=len(table.rows) > _LONGEST_FLOAT,
        is_wide=len(table.columns) > _MOST_UPRIGHT_COLUMNS,
    )


def _layout(table: ReportTable) -> str:
    """Numbers to the right, text to the left, long text in paragraphs of equal width."""
    lengths = [
        max((len(cell) for cell in column if isinstance(cell, str)), default=0)
        for column in zip(*table.rows, strict=True)
    ]
    width = 0.6 / max(1, sum(length > _LONGEST_PLAIN_CELL for length in lengths))
    paragraph = rf">{{\raggedright\arraybackslash}}p{{{width:.2f}\linewidth}}"
    kinds = [
        paragraph if length > _LONGEST_PLAIN_CELL else "l" if length else "r" for length in lengths
    ]
    return "@{}" + "".join(kinds) + "@{}"
