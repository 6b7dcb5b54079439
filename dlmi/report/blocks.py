"""The parts of a report: tables, figures, and text of a model."""

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from dlmi.text import visible

_T = TypeVar("_T")

Cell = str | int | float | None

ASSETS = files("dlmi.report") / "assets"
_LONGEST = 2000  # characters of a model's text in a table; the page's list of results has all
_TEXTS = tomllib.loads((ASSETS / "texts.toml").read_text(encoding="utf-8"))


class ModelText(str):
    r"""A prompt or an output on one line, with control characters spelled out and spaces visible.

    `parts` are its tokens, each with whether it is marked as wrong. Escape it before it is shown.

    >>> text = ModelText([("to be", False), ("\n", True)])
    >>> text, text.parts
    ('to␣be⏎', (('to␣be', False), ('⏎', True)))
    """

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> "ModelText":
        """From tokens as the tokenizer decodes them."""
        cut = ((f"{t[:_LONGEST]}…" if len(t) > _LONGEST else t, wrong) for t, wrong in parts)
        shown = tuple((visible(text).replace(" ", "␣"), wrong) for text, wrong in cut)
        made = super().__new__(cls, "".join(text for text, _ in shown))
        made.parts = shown
        return made


@dataclass
class Figure:
    """A figure on a canvas; `svg` is set when it is written."""

    name: str  # of its files, without suffix
    title: str
    caption: str
    svg: str = ""
    canvas: Any = None


@dataclass(frozen=True)
class ReportTable:
    """A table of plain values, formatted by whoever shows them; text of models is `ModelText`."""

    name: str  # of its files, without suffix
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, name: str, lines: Sequence[Mapping[str, Cell]], **values: Any) -> "ReportTable":
        """From lines that all have the same columns; the rest as `block_texts`."""
        columns = tuple(lines[0]) if lines else ()
        rows = tuple(tuple(line.values()) for line in lines)
        return cls(*block_texts(name, **values), columns, rows)

    def is_number(self, column: int) -> bool:
        """Whether a column holds only numbers, which are aligned to the right."""
        return all(isinstance(row[column], int | float | None) for row in self.rows)


def block_texts(name: str, part: int = 1, **values: Any) -> tuple[str, str, str]:
    """File name, title and caption of a table or figure, from `assets/texts.toml`."""
    texts = _TEXTS[name]
    suffix, of = (f"_{part}", f", part {part}") if part > 1 else ("", "")
    return name + suffix, texts["title"] + of, texts["caption"].format(**values)


def in_parts(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    """The fewest parts of at most `size` items, as even as possible."""
    count = -(-len(items) // size)
    ends = [len(items) * part // count for part in range(count + 1)] if count else []
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def render(template: str, filters: Mapping[str, Any], **values: Any) -> str:
    """A template of the assets, filled in; values in HTML are escaped."""
    environment = Environment(
        loader=PackageLoader("dlmi.report", "assets"),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters.update(filters)
    return environment.get_template(template).render(**values)


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, so that no reader sees half of it."""
    scratch = path.with_name(f"{path.name}.tmp")
    # Notes name files, and a file name may be invalid Unicode.
    scratch.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    scratch.replace(path)


def format_cell(value: Cell) -> str:
    """A cell as tables show it; None and NaN are a dash.

    >>> [format_cell(value) for value in (0.12345, 12345, 1234.5, 3e-5, "a")]
    ['0.123', '12,345', '1,234.5', '3e-05', 'a']
    """
    if value is None or value != value:  # NaN
        return "\N{EN DASH}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return visible(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e9):
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"
