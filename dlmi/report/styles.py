"""The look of figures: one text column wide, legible without colour, with space for every label.

Colours are those of Okabe and Ito without yellow, which is too pale for lines. Every method also
has a hatch, a marker and a line style of its own, so that grey prints can be read.
"""

import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file
from types import MappingProxyType
from typing import Any

from matplotlib import rc_context, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import findfont, get_font

from dlmi.report.blocks import ASSETS
from dlmi.text import visible

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#4D4D4D")
# No dots: an SVG has a curve for each of them.
_HATCHES = (
    *("", "////", "++++", "\\\\\\\\", "xxxx", "----", "||||"),
    *("////", "++++", "xxxx", "----", "||||", "\\\\\\\\", "--//"),
)
_MARKERS = "osD^vPpX<>hd"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

_WIDTH = 3.35  # inches: a column of text
_LINE = 0.15  # inches: a line of text
_CHARACTER = 0.063  # inches: about as wide as one is
_LONGEST_TEXT = 160


@dataclass(frozen=True)
class Style:
    """Matplotlib's arguments for a method, the same in every figure of a report."""

    bar: dict[str, Any]
    line: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    place: str  # LM and N; shown once, above the figure, where all panels share it
    title: str
    shown: Collection[str]  # entries of the legend that it needs
    draw: Callable[[Axes], None]


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """One style each, in order."""
    styles = {}
    for place, label in enumerate(labels):
        colour = _COLOURS[place % len(_COLOURS)]
        # The second time round, bars are white with a coloured hatch.
        fill, edge = (colour, "white") if place < len(_COLOURS) else ("white", colour)
        hatch = _HATCHES[place % len(_HATCHES)]
        bar = {"facecolor": fill, "edgecolor": edge, "hatch": hatch, "linewidth": 0.5}
        line = {"color": colour, "linestyle": _DASHES[place % len(_DASHES)]}
        mark = {"marker": _MARKERS[place % len(_MARKERS)], "markeredgecolor": "white"}
        styles[label] = Style(bar, {**line, **mark, "markeredgewidth": 0.4})
    return styles


@contextmanager
def house_style(svg_salt: str = "dlmi") -> Iterator[None]:
    """Matplotlib's settings while a figure is drawn and written; the caller's are restored."""
    with as_file(ASSETS / "report.mplstyle") as sheet, rc_context(fname=sheet):
        rcParams["svg.hashsalt"] = svg_salt  # without it, ids within an SVG are random
        yield


@house_style()
def draw_panels(
    panels: Sequence[Panel],
    height: float,
    labels: tuple[str, str] = ("", ""),
    legend: Mapping[str, Artist] = MappingProxyType({}),
    width: float = 0.0,
) -> Canvas:
    """Panels below each other with one legend; the figure is as high as they need.

    Args:
        panels: From the top down.
        height: Inches of a panel without its title.
        labels: Of the x axis (below the lowest panel only) and of each y axis.
        legend: Artists by name.
        width: Inches, if more than a text column.
    """
    width = max(_WIDTH, width)
    canvas = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)  # needs no display
    is_one_place = len({panel.place for panel in panels}) == 1
    head = safe_text(panels[0].place, width - 0.2) if is_one_place else ""
    titles = [p.title if is_one_place else f"{p.place}, {p.title}" for p in panels]
    titles = [safe_text(title, width - 0.6) for title in titles]
    rows = canvas.subplots(len(panels), sharey=True, squeeze=False).flat
    for axes, panel, title in zip(rows, panels, titles, strict=True):
        axes.set(title=title, ylabel=labels[1])
        panel.draw(axes)
    axes.set(xlabel=labels[0])
    if axes.get_yscale() == "linear" and not axes.yaxis_inverted():
        axes.set_ylim(bottom=0)  # an LCS, on one scale for all panels
        axes.locator_params(axis="y", nbins=5)
    if head:
        canvas.suptitle(head)
    lines = sum(text.count("\n") + bool(text) for text in [head, *titles])
    paper = len(panels) * height + lines * _LINE + 0.3
    artists = list(legend.values())
    names = [safe_text(name, width - 0.7) for name in legend]
    for columns in range(len(names), 0, -1):  # as many as fit
        made = canvas.legend(artists, names, ncols=columns, loc="outside lower center")
        box = made.get_window_extent()
        if columns == 1 or box.width < canvas.bbox.width:
            paper += box.height / canvas.dpi
            break
        made.remove()
    canvas.set_size_inches(width, paper)
    return canvas


def safe_text(text: str, inches: float = _WIDTH) -> str:
    """Text that a figure can show: no markup, no character that the font lacks, wrapped."""
    known = get_font(findfont("DejaVu Sans")).get_charmap()  # as in assets/report.mplstyle
    shown = "".join(c if ord(c) in known else "?" for c in visible(text))
    if len(shown) > _LONGEST_TEXT:
        shown = f"{shown[: _LONGEST_TEXT // 2]}…{shown[1 - _LONGEST_TEXT // 2 :]}"
    shown = textwrap.fill(shown, max(12, int(inches / _CHARACTER)))
    return shown.replace("\\", "\\\\").replace("$", r"\$") if "$" in shown else shown
