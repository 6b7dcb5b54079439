"""Tables for LaTeX: booktabs, and nothing in a cell that LaTeX would take for a command."""

from dlmi.report.blocks import Cell, ModelText, ReportTable, format_cell
from dlmi.text import visible

# Longer tables may break over pages; longtable does not work in two columns, tabular does.
_LONGEST_FLOAT = 40
_LONGEST_PLAIN_CELL = 26
_MOST_UPRIGHT_COLUMNS = 7

_ESCAPES = {
    **{character: f"\\{character}" for character in "{}$&#%"},
    # After a line's end the first two would be arguments of it; two hyphens would be a dash.
    **{character: f"{{{character}}}" for character in "[*-"},
    "\\": r"\textbackslash{}",
    "_": r"\_\allowbreak{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
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

_HEADER = """\
% Written by dlmi.
% Needs \\usepackage{amssymb,array,booktabs,graphicx,longtable,pdflscape,textcomp,xcolor},
% \\usepackage[T1]{fontenc} and \\usepackage[utf8]{inputenc}.
% Characters beyond Latin-1 are shown by their number (U+...).
"""
# As wide as the text at most, and no wider than it is.
_FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


def escape_latex(text: str) -> str:
    r"""Text that LaTeX shows as it is; characters that its fonts lack are shown by their number.

    >>> escape_latex("a_b & 50%") == r"a\_\allowbreak{}b \& 50\%"
    True
    """
    return "".join(_escape_character(character) for character in visible(text))


def _escape_character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isascii() or (character.isalpha() and ord(character) < 0x100):
        return character
    return rf"\texttt{{U+{ord(character):04X}}}"


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
    if has_exponent and not isinstance(value, bool):
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
        position_float=None if is_long else "centering",
        hrules=True,
    )
    if not is_long:
        text = text.replace(r"\centering", r"\centering\footnotesize", 1)
        text = text.replace(r"\begin{tabular}", f"{_FITTED}\n\\begin{{tabular}}", 1)
        return _HEADER + r"\end{tabular}}".join(text.rsplit(r"\end{tabular}", 1))
    text = f"{{\\scriptsize\n{text}}}\n"
    if len(table.columns) > _MOST_UPRIGHT_COLUMNS:
        text = f"\\begin{{landscape}}\n{text}\\end{{landscape}}\n"
    return _HEADER + text


def _layout(table: ReportTable) -> str:
    """Numbers to the right, text to the left, long text in paragraphs of equal width."""
    texts = [
        [cell for cell in cells if isinstance(cell, str)] for cells in zip(*table.rows, strict=True)
    ]
    wide = [max(map(len, column), default=0) > _LONGEST_PLAIN_CELL for column in texts]
    width = 0.6 / max(1, sum(wide))
    paragraph = rf">{{\raggedright\arraybackslash}}p{{{width:.2f}\linewidth}}"
    kinds = [
        paragraph if is_wide else "r" if table.is_number(i) else "l"
        for i, is_wide in enumerate(wide)
    ]
    return "@{}" + "".join(kinds) + "@{}"
