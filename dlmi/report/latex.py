"""Tables for LaTeX: booktabs, and nothing in a cell that LaTeX would take for a command."""

from collections.abc import Sequence

from dlmi.report.page import format_cell
from dlmi.report.parts import Cell, ModelText, ReportTable
from dlmi.text import visible

# Longer tables may break over pages; longtable does not work in two columns, tabular does.
_LONGEST_FLOAT = 40
_LONGEST_PLAIN_CELL = 26
_MOST_UPRIGHT_COLUMNS = 7

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_\allowbreak{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    # After a line's end these two would be arguments of it; two hyphens would be a dash.
    "[": "{[}",
    "*": "{*}",
    "-": "{-}",
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
    if isinstance(value, float) and "e" in (shown := format_cell(value)):
        mantissa, exponent = shown.split("e")
        return rf"${mantissa}\times10^{{{int(exponent)}}}$"
    shown = format_cell(value)
    if isinstance(value, int | float):
        return shown.replace("-", "$-$")
    return "--" if value is None else escape_latex(shown)


def latex_table(table: ReportTable) -> str:
    """The whole file: a float, or a longtable where it would not fit on a page."""
    layout = _layout(table)
    head = " & ".join(rf"\textbf{{{escape_latex(column)}}}" for column in table.columns) + r" \\"
    body = [" & ".join(map(latex_cell, row)) + r" \\" for row in table.rows]
    caption = rf"\caption{{{escape_latex(f'{table.title}. {table.caption}')}}}"
    label = rf"\label{{tab:{table.name}}}"
    if len(table.rows) > _LONGEST_FLOAT:
        is_broad = len(table.columns) > _MOST_UPRIGHT_COLUMNS
        lines = [
            *([r"\begin{landscape}"] if is_broad else []),
            *(r"{\scriptsize", rf"\begin{{longtable}}{{{layout}}}", rf"{caption} {label} \\"),
            *(r"\toprule", head, r"\midrule", r"\endfirsthead"),
            *(r"\toprule", head, r"\midrule", r"\endhead", r"\bottomrule", r"\endfoot"),
            *(*body, r"\end{longtable}", "}"),
            *([r"\end{landscape}"] if is_broad else []),
        ]
    else:
        lines = [
            *(r"\begin{table*}[t]", r"\centering\footnotesize", caption, label),
            # As wide as the text at most, and no wider than it is.
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            *(rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body),
            *(r"\bottomrule", r"\end{tabular}}", r"\end{table*}"),
        ]
    return _HEADER + "\n".join(lines) + "\n"


def _layout(table: ReportTable) -> str:
    """Numbers to the right, text to the left, long text in paragraphs of equal width."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    wide = [_is_wide(column) for column in columns]
    width = 0.6 / max(1, sum(wide))
    kinds = [
        rf">{{\raggedright\arraybackslash}}p{{{width:.2f}\linewidth}}"
        if is_wide
        else "r"
        if all(isinstance(cell, int | float | None) for cell in column)
        else "l"
        for column, is_wide in zip(columns, wide, strict=True)
    ]
    return "@{}" + "".join(kinds) + "@{}"


def _is_wide(column: Sequence[Cell]) -> bool:
    return any(isinstance(cell, str) and len(cell) > _LONGEST_PLAIN_CELL for cell in column)
