"""Everything of a report but its page, on disk: pictures, tables, and the text that ties them.

Nothing in a cell is taken for a command by whoever reads the file: Markdown, a spreadsheet, LaTeX.
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

# What Markdown reads as more than a character. An underscore inside a word and brackets that no
# address follows are what they are.
_MARKUP = re.compile(r"[\\`*{}<>|~$&#!]|(?<!\w)_|_(?!\w)|\](?=\s*[(\[:])")

# What a spreadsheet would take for a formula, unless it is a number.
_FORMULA = re.compile(r"[=@]|[+-](?!\d+(\.\d+)?(e[+-]?\d+)?$)")

# Longer tables may break over pages; longtable does not work in two columns, tabular does.
_LONGEST_FLOAT = 40
_LONGEST_PLAIN_CELL = 26
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
    "±": r"$\pm$",
    "τ": r"$\tau$",
    "²": r"$^2$",
    "–": "--",  # noqa: RUF001
    "−": "$-$",  # noqa: RUF001
    "·": r"$\cdot$",
    "…": r"\ldots{}",
}
_BEYOND_FONTS = re.compile("[^\x00-\x7fªµºÀ-ÖØ-öø-ÿ]")

_HEADER = """\
% Written by dlmi.
% Needs \\usepackage{amssymb,array,booktabs,graphicx,longtable,pdflscape,textcomp,xcolor},
% \\usepackage[T1]{fontenc} and \\usepackage[utf8]{inputenc}.
% Characters beyond Latin-1 are shown by their number (U+...).
"""
# As wide as the text at most, and no wider than it is.
_FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


def write_figures(folder: Path, figures: Sequence[Figure]) -> None:
    """Each as PNG, PDF and SVG, undated: the same data give the same files."""
    folder.mkdir(exist_ok=True)
    for figure in figures:
        file, canvas, picture = folder / figure.name, figure.canvas, io.StringIO()
        with house_style(svg_salt=figure.name):
            canvas.savefig(f"{file}.png", dpi=_DOTS_PER_INCH)
            canvas.set_layout_engine("none")  # everything has its place by now
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
    """`report.md`: what was measured, what was wrong, then every figure and table."""
    filters = {"md": markdown_text, "md_table": markdown_table}
    values = {"data": data, "figures": figures, "tables": tables, "version": __version__}
    write_file(path, render("report.md.j2", filters, **values))


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
    """Numbers in full, None and NaN empty, text on one line each, formulas quoted."""
    file = io.StringIO()
    rows = (map(_csv_cell, row) for row in (table.columns, *table.rows))
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _csv_cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return None if value != value else value
    text = visible(value)
    return f"'{text}" if _FORMULA.match(text) else text


def escape_latex(text: str) -> str:
    r"""Text that LaTeX shows as it is; characters that its fonts lack are shown by their number.

    >>> escape_latex("a_b & 50%") == r"a\_\allowbreak{}b \& 50\%"
    True
    """
    shown = visible(text).translate(str.maketrans(_ESCAPES))
    return _BEYOND_FONTS.sub(lambda found: rf"\texttt{{U+{ord(found[0]):04X}}}", shown)


def latex_cell(value: Cell) -> str:
    """A cell; what a model got wrong is red."""
    if isinstance(value, ModelText):
        return "".join(
            rf"\textcolor{{red}}{{{escape_latex(text)}}}" if is_wrong else escape_latex(text)
            for text, is_wrong in value.parts
        )
    shown = format_cell(value)
    if not isinstance(value, int | float):
        return escape_latex(shown)
    mantissa, has_exponent, exponent = shown.partition("e")
    if has_exponent:
        return rf"${mantissa}\times10^{{{int(exponent)}}}$"
    return shown.replace("-", "$-$")


def latex_table(table: ReportTable) -> str:
    """The whole file: a float, or a longtable where it would not fit on a page."""
    from pandas import DataFrame  # here, since nothing else needs it

    frame = DataFrame([list(map(latex_cell, row)) for row in table.rows], dtype=object)
    frame.columns = [rf"\textbf{{{escape_latex(column)}}}" for column in table.columns]
    is_long = len(table.rows) > _LONGEST_FLOAT
    text: str = frame.style.hide(axis="index").to_latex(
        environment="longtable" if is_long else "table*",
        column_format=_layout(table),
        caption=escape_latex(f"{table.title}. {table.caption}"),
        label=f"tab:{table.name}",
        position=None if is_long else "t",
        hrules=True,
    )
    if not is_long:
        start = rf"\centering\footnotesize{_FITTED}" + "\n" + r"\begin{tabular}"
        text = text.replace(r"\begin{tabular}", start, 1)
        return _HEADER + r"\end{tabular}}".join(text.rsplit(r"\end{tabular}", 1))
    text = f"{{\\scriptsize\n{text}}}\n"
    is_wide = len(table.columns) > _MOST_UPRIGHT_COLUMNS
    return _HEADER + (f"\\begin{{landscape}}\n{text}\\end{{landscape}}\n" if is_wide else text)


def _layout(table: ReportTable) -> str:
    """Numbers to the right, text to the left, long text in paragraphs of equal width."""
    wide = [
        any(isinstance(cell, str) and len(cell) > _LONGEST_PLAIN_CELL for cell in column)
        for column in zip(*table.rows, strict=True)
    ]
    width = 0.6 / max(1, sum(wide))
    paragraph = rf">{{\raggedright\arraybackslash}}p{{{width:.2f}\linewidth}}"
    kinds = [
        paragraph if is_wide else "r" if table.is_number(i) else "l"
        for i, is_wide in enumerate(wide)
    ]
    return "@{}" + "".join(kinds) + "@{}"
