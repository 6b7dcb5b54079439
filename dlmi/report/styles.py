"""How figures look: print-sized, and told apart without colour.

Colours are those of Okabe and Ito without yellow, which is too pale for lines. Every method also
has a hatch, a marker and a line style of its own, so that grey prints can be read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import FontProperties, get_font
from matplotlib.font_manager import findfont as find_font

from dlmi.text import visible

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#4D4D4D")
_HATCHES = (
    *("", "////", "....", "\\\\\\\\", "xxxx", "----", "||||"),
    *("////", "....", "xxxx", "----", "||||", "\\\\\\\\", "++++"),
)
_MARKERS = "osD^vPpX<>hd"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

_FLOORS = {"no_prompt": ("-", "o"), "random_prompt": (":", "x"), "copy_prompt": ("--", "s")}

_LEGEND_POINTS = 7.5
_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": _LEGEND_POINTS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Style:
    """How a method is drawn in every figure of a report.

    Attributes:
        colour: Of its lines and bars.
        hatch: Of its bars.
        is_hollow: Whether its bars are white with a coloured hatch, not the other way round.
        marker: Of its points.
        dashes: Of its lines.
    """

    colour: str
    hatch: str
    is_hollow: bool
    marker: str
    dashes: Any

    @property
    def bar(self) -> dict[str, Any]:
        """How matplotlib is told of its bars."""
        if self.is_hollow:
            fill, edge = "white", self.colour
        else:
            fill, edge = self.colour, "white"
        return {"facecolor": fill, "edgecolor": edge, "hatch": self.hatch, "linewidth": 0.5}

    @property
    def line(self) -> dict[str, Any]:
        """How matplotlib is told of its lines."""
        return {
            "color": self.colour,
            "linestyle": self.dashes,
            "marker": self.marker,
            "markeredgecolor": "white",
            "markeredgewidth": 0.4,
        }


@dataclass(frozen=True)
class Drawing:
    """A figure that is not written yet.

    Attributes:
        name: Of its files, without suffix.
        title: A few words.
        caption: What is shown and how it was measured.
        canvas: The picture.
    """

    name: str
    title: str
    caption: str
    canvas: Canvas


def floor_line(floor: str) -> dict[str, Any]:
    """How matplotlib is told of a floor: a thin black line with a mark at its left end."""
    dashes, marker = _FLOORS[floor]
    return {
        "color": "black",
        "linewidth": 0.7,
        "linestyle": dashes,
        "marker": marker,
        "markevery": [0],
        "markersize": 4,
        "markeredgewidth": 0.7,
        "markerfacecolor": "white",
        "clip_on": False,  # a floor may be 0
    }


def numbered(name: str, title: str, caption: str, pages: Sequence[Canvas]) -> list[Drawing]:
    """The pages of a figure; from the second on they say which one they are."""
    return [
        Drawing(name, title, caption, page)
        if number == 1
        else Drawing(f"{name}_{number}", f"{title}, part {number}", caption, page)
        for number, page in enumerate(pages, start=1)
    ]


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """One style each, in order."""
    return {
        label: Style(
            _COLOURS[i % len(_COLOURS)],
            _HATCHES[i % len(_HATCHES)],
            i >= len(_COLOURS),
            _MARKERS[i % len(_MARKERS)],
            _DASHES[i % len(_DASHES)],
        )
        for i, label in enumerate(labels)
    }


@contextmanager
def house_style(svg_salt: str = "dlmi") -> Iterator[None]:
    """Matplotlib's settings while a figure is drawn and written; the caller's come back after.

    Args:
        svg_salt: Makes the ids within an SVG file, which would be random without one.
    """
    settings: dict[Any, Any] = {**_SETTINGS, "svg.hashsalt": svg_salt}
    with rc_context(settings):
        yield


def new_canvas(width: float, height: float) -> Canvas:
    """An empty figure of so many inches that needs no display."""
    canvas = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas


def safe_text(text: str, longest: int = 40) -> str:
    """Text that a figure can show: no markup, no character that the font lacks, not too long."""
    known = get_font(find_font(FontProperties(family=_SETTINGS["font.family"]))).get_charmap()
    shown = "".join(c if ord(c) in known else "?" for c in visible(text))
    if len(shown) > longest:
        half = longest // 2
        shown = f"{shown[: longest - half - 1]}…{shown[-half:]}"
    return shown.replace("\\", "\\\\").replace("$", r"\$") if "$" in shown else shown


def legend_below(canvas: Canvas, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """One legend for all panels, in as many columns as the longest label leaves room for."""
    longest = max((len(label) for label in labels), default=1)
    inches = (longest * 0.62 + 4.5) * _LEGEND_POINTS / 72
    columns = max(1, min(len(labels), int(canvas.get_figwidth() / inches)))
    rows = -(-len(labels) // columns)
    columns = -(-len(labels) // rows)  # as even as it gets
    canvas.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3,
        columnspacing=1.2,
    )
