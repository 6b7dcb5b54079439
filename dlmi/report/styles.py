"""How figures look: print-sized, told apart without colour, and with room for every text.

Colours are those of Okabe and Ito without yellow, which is too pale for lines. Every method also
has a hatch, a marker and a line style of its own, so that grey prints can be read.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file
from typing import Any

from matplotlib import rc_context, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import FontProperties, get_font
from matplotlib.font_manager import findfont as find_font

from dlmi.report.blocks import ASSETS
from dlmi.text import visible

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#4D4D4D")
_HATCHES = (
    *("", "////", "....", "\\\\\\\\", "xxxx", "----", "||||"),
    *("////", "....", "xxxx", "----", "||||", "\\\\\\\\", "++++"),
)
_MARKERS = "osD^vPpX<>hd"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

_WIDTH = 6.8  # inches: a text block
# As in assets/report.mplstyle.
_FONT, _TITLE_POINTS, _POINTS = "DejaVu Sans", 8.5, 7.5
_LONGEST_TEXT = 160


@dataclass(frozen=True)
class Style:
    """How a method is drawn in every figure of a report, as matplotlib is told."""

    colour: str
    bar: dict[str, Any]
    line: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what stands above it, and how it is filled."""

    title: str
    draw: Callable[[Axes], None]


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """One style each, in order."""
    return {label: _style(place) for place, label in enumerate(labels)}


def _style(place: int) -> Style:
    colour = _COLOURS[place % len(_COLOURS)]
    # The second time round, bars are white with a coloured hatch.
    fill, edge = (colour, "white") if place < len(_COLOURS) else ("white", colour)
    hatch = _HATCHES[place % len(_HATCHES)]
    bar = {"facecolor": fill, "edgecolor": edge, "hatch": hatch, "linewidth": 0.5}
    line = {
        "color": colour,
        "linestyle": _DASHES[place % len(_DASHES)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
    }
    return Style(colour, bar, line)


@contextmanager
def house_style(svg_salt: str = "dlmi") -> Iterator[None]:
    """Matplotlib's settings while a figure is drawn and written; the caller's come back after."""
    with as_file(ASSETS / "report.mplstyle") as sheet, rc_context(fname=sheet):
        rcParams["svg.hashsalt"] = svg_salt  # ids within an SVG would be random without
        yield


def panel_grid(
    panels: Sequence[Panel | None],
    columns: int,
    size: tuple[float, float],
    labels: tuple[str, str] = ("", ""),
    legend: Sequence[tuple[str, Artist]] = (),
    heading: str = "",
) -> Canvas:
    """Panels under a heading, with one legend below them, on as much paper as it takes.

    Args:
        panels: From left to right, then down; None for a place that stays empty.
        columns: How many beside each other.
        size: Least inches of a panel, its texts left out.
        labels: Of the axes below the lowest and beside the leftmost panels.
        legend: Names and what they are drawn with.
        heading: Over all of them.
    """
    rows = -(-len(panels) // columns)
    width = max(_WIDTH, columns * size[0])
    titles = [
        safe_text(panel.title, width / columns - 0.55, _TITLE_POINTS) if panel else ""
        for panel in panels
    ]
    head = safe_text(heading, width - 0.4, _TITLE_POINTS)
    names = [safe_text(name, width - 0.8) for name, _ in legend]
    longest = max((len(line) for name in names for line in name.split("\n")), default=1)
    across = max(1, min(len(names), int(width / (_inches(longest) + 0.55))))
    down = -(-len(names) // across)
    lines = sum(
        max(title.count("\n") + bool(title) for title in titles[row * columns :][:columns])
        for row in range(rows)
    )
    lines += head.count("\n") + bool(head)
    of_legend = down * (1 + max((name.count("\n") for name in names), default=0))
    height = rows * size[1] + lines * 0.16 + of_legend * 0.17 + 0.3
    canvas = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)  # needs no display
    if head:
        canvas.suptitle(head)
    last = {i % columns: i for i, panel in enumerate(panels) if panel}
    for i, panel in enumerate(panels):
        if panel is None:
            continue
        axes = canvas.add_subplot(rows, columns, i + 1)
        axes.set_title(titles[i])
        panel.draw(axes)
        if i == last[i % columns]:
            axes.set_xlabel(labels[0])
        if i % columns == 0:
            axes.set_ylabel(labels[1])
    if names:
        canvas.legend(
            [handle for _, handle in legend],
            names,
            loc="outside lower center",
            ncols=-(-len(names) // down),  # as even as it gets
            frameon=False,
            handlelength=3,
            columnspacing=1.2,
        )
    return canvas


def safe_text(text: str, inches: float = _WIDTH, points: float = _POINTS) -> str:
    """Text that a figure can show: no markup, no character that the font lacks, wrapped."""
    known = get_font(find_font(FontProperties(family=_FONT))).get_charmap()
    shown = "".join(c if ord(c) in known else "?" for c in visible(text))
    if len(shown) > _LONGEST_TEXT:
        shown = f"{shown[: _LONGEST_TEXT // 2]}…{shown[1 - _LONGEST_TEXT // 2 :]}"
    shown = textwrap.fill(shown, max(12, int(inches / _inches(1, points))))
    return shown.replace("\\", "\\\\").replace("$", r"\$") if "$" in shown else shown


def _inches(characters: int, points: float = _POINTS) -> float:
    """About how wide so many characters are."""
    return characters * 0.62 * points / 72
