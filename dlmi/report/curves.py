"""Curves over a run: best LCS so far against steps and token passes, and the temperature."""

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from dlmi.report.loading import Axis, Loaded
from dlmi.report.naming import AXIS_UNITS, group_titles
from dlmi.report.styles import (
    Drawing,
    Style,
    house_style,
    legend_below,
    new_canvas,
    numbered,
    safe_text,
    styles_of,
)
from dlmi.rows import Inversion

_POINTS = 160  # of a curve
_MARKS = 7  # markers along it
_PANELS_PER_FIGURE = 6

# What a row was worth at each evaluation: positions, ascending, and values.
Path = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Curve:
    """A mean over targets (seeds averaged first) along a run, and its standard error.

    Attributes:
        xs: Positions.
        means: Values.
        errors: Standard errors over targets; 0 for a single target.
    """

    xs: list[float]
    means: list[float]
    errors: list[float]


def best_so_far(row: Inversion, axis: Axis) -> Path:
    """The best honest LCS after each evaluation."""
    positions = [float(getattr(point, axis)) for point in row.trace]
    return positions, list(itertools.accumulate((point.lcs for point in row.trace), max))


def temperature(row: Inversion, axis: Axis) -> Path:
    """The mean temperature at each evaluation that knows it."""
    points = [point for point in row.trace if point.means.get("tau", 0) > 0]
    return [float(getattr(point, axis)) for point in points], [p.means["tau"] for p in points]


def mean_curve(
    rows: Sequence[Inversion], axis: Axis, path: Callable[[Inversion, Axis], Path]
) -> Curve | None:
    """The mean at common positions; where a target has stopped it counts with its last value."""
    paths = [(row.target_id, path(row, axis)) for row in rows]
    paths = [(target, found) for target, found in paths if found[0]]
    if not paths:
        return None
    begin = max(positions[0] for _, (positions, _) in paths)
    every = {x for _, (positions, _) in paths for x in positions if x >= begin}
    xs = _thinned(sorted(every | {begin}))
    means, errors = [], []
    for x in xs:
        values: dict[str, list[float]] = {}
        for target, (positions, heights) in paths:
            latest = bisect.bisect_right(positions, x) - 1
            values.setdefault(target, []).append(heights[latest])
        by_target = [statistics.fmean(found) for found in values.values()]
        means.append(statistics.fmean(by_target))
        many = len(by_target) > 1
        errors.append(statistics.stdev(by_target) / math.sqrt(len(by_target)) if many else 0.0)
    return Curve(xs, means, errors)


def draw_anytime(loaded: Loaded, axis: Axis) -> list[Drawing]:
    """Best honest LCS so far against a kind of cost, one panel per LM and N."""
    unit = AXIS_UNITS[axis]
    caption = (
        f"Best honest LCS so far against {unit} spent on a target: mean over targets, seeds "
        "averaged first, and a band of one standard error over targets. A target that stopped "
        "keeps its value to the end of its method's curve."
    )
    name = f"anytime_{'steps' if axis == 'step' else axis}"
    pages = _draw(loaded, axis, best_so_far, "best honest LCS so far", is_share=True)
    return numbered(name, f"Best LCS so far by {unit}", caption, pages)


def draw_temperature(loaded: Loaded) -> list[Drawing]:
    """The temperature of the methods that have one, one panel per LM and N."""
    caption = (
        "Effective temperature (mean over prompt positions) against steps: mean over targets, "
        "seeds averaged first, and a band of one standard error over targets. A target that "
        "stopped keeps its last value."
    )
    pages = _draw(loaded, "step", temperature, "temperature τ", is_share=False)
    return numbered("temperature", "Temperature by step", caption, pages)


def _draw(
    loaded: Loaded,
    axis: Axis,
    path: Callable[[Inversion, Axis], Path],
    height_name: str,
    is_share: bool,
) -> list[Canvas]:
    labels = list(dict.fromkeys(label for group in loaded.groups for label in group.labels))
    styles = styles_of(labels)
    places = []
    for name, group in zip(group_titles(loaded.groups), loaded.groups, strict=True):
        for length in group.prompt_lengths:
            members = [series for series in group.series if series.prompt_length == length]
            found = [(s.label, mean_curve(s.rows, axis, path)) for s in members]
            curves = [(label, curve) for label, curve in found if curve is not None]
            if curves:
                places.append((f"{name}, N={length}", curves))
    with house_style():
        return [
            _draw_page(places[i : i + _PANELS_PER_FIGURE], styles, axis, height_name, is_share)
            for i in range(0, len(places), _PANELS_PER_FIGURE)
        ]


def _draw_page(
    places: Sequence[tuple[str, list[tuple[str, Curve]]]],
    styles: dict[str, Style],
    axis: Axis,
    height_name: str,
    is_share: bool,
) -> Canvas:
    columns = min(2, len(places))
    rows = -(-len(places) // columns)
    canvas = new_canvas(6.8, 2.5 * rows + 0.9)
    labels = list(styles)
    for i, (title, curves) in enumerate(places):
        axes = canvas.add_subplot(rows, columns, i + 1)
        axes.set_title(safe_text(title, 60 // columns + 14))
        for label, curve in curves:
            _draw_curve(axes, curve, styles[label], labels.index(label), is_share)
        _set_scales(axes, axis, is_share)
        if i % columns == 0:
            axes.set_ylabel(height_name)
        if i + columns >= len(places):
            axes.set_xlabel(AXIS_UNITS[axis])
    shown = {label for _, curves in places for label, _ in curves}
    order = [label for label in labels if label in shown]
    handles = [Line2D([0], [0], **styles[label].line) for label in order]
    legend_below(canvas, handles, [safe_text(label) for label in order])
    return canvas


def _draw_curve(axes: Axes, curve: Curve, style: Style, place: int, is_step: bool) -> None:
    every = max(1, len(curve.xs) // _MARKS)
    drawstyle = "steps-post" if is_step else "default"
    axes.plot(
        curve.xs,
        curve.means,
        **style.line,
        drawstyle=drawstyle,
        # Markers of different methods at different places, lest they cover each other.
        markevery=(place * every // 3 % every, every),
    )
    if any(curve.errors):
        low = [mean - error for mean, error in zip(curve.means, curve.errors, strict=True)]
        high = [mean + error for mean, error in zip(curve.means, curve.errors, strict=True)]
        band: dict[str, Any] = {"color": style.colour, "alpha": 0.16, "linewidth": 0}
        axes.fill_between(curve.xs, low, high, **band, step="post" if is_step else None)


def _set_scales(axes: Axes, axis: Axis, is_share: bool) -> None:
    if axis == "token_passes":  # methods differ in it by orders of magnitude
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    if is_share:
        axes.set_ylim(0, 1.04)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    else:
        axes.set_yscale("log")


def _thinned(positions: list[float]) -> list[float]:
    """At most so many of them, the first and the last included."""
    if len(positions) <= _POINTS:
        return positions
    reach = len(positions) - 1
    return [positions[round(i * reach / (_POINTS - 1))] for i in range(_POINTS)]
