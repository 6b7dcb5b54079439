"""Figures of honest LCS and temperature, by method: bars over difficulty, curves over a run."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from dlmi.report.blocks import Figure, block_texts, in_parts
from dlmi.report.estimates import Measure, honest_lcs, mean_over_targets
from dlmi.report.loading import ReportData, Series, points_within
from dlmi.report.names import form_name, k_name
from dlmi.report.result_files import AXIS_UNITS, Axis, Budget
from dlmi.report.styles import Panel, Style, house_style, panel_grid, styles_of
from dlmi.report.tables import matrix_lcs
from dlmi.rows import FLOORS, Inversion

_ROWS_PER_FIGURE = 4
_MOST_COLUMNS = 3
_BAR_INCHES = 0.045  # thinner bars cannot be told apart in print
_WIDEST_BAR = 0.3  # of the room for one difficulty
_FLOOR_LINES = {"no_prompt": ("-", "o"), "random_prompt": (":", "x"), "copy_prompt": ("--", "s")}

_POINTS = 160  # of a curve
_MARKS = 7  # markers along it
_PANELS_PER_FIGURE = 6

# What a row was worth at each evaluation: positions, ascending, and values.
Path = tuple[list[float], list[float]]


class Curve(NamedTuple):
    """A mean over targets (seeds averaged first) along a run."""

    xs: NDArray[np.float64]
    means: NDArray[np.float64]
    errors: NDArray[np.float64]  # standard errors; 0 for a single target


def draw_bars(data: ReportData) -> list[Figure]:
    """Honest LCS by difficulty: rows of panels for each LM and N, one panel per budget."""
    styles = styles_of(data.labels)
    pages = []
    for page in in_parts(list(data.places()), _ROWS_PER_FIGURE):
        columns = min(_MOST_COLUMNS, max(len(group.budgets) for _, group, _ in page))
        panels: list[Panel | None] = []
        widest = 0.0
        for title, group, members in page:
            for budget in group.budgets:
                name = f"N={members[0].prompt_length}, {budget}"
                draw = partial(_bar_panel, members, styles, honest_lcs(budget))
                panels.append(Panel(name if len(data.groups) == 1 else f"{title}, {name}", draw))
            panels += [None] * (-len(panels) % columns)
            clusters = len({row.k for series in members for row in series.rows})
            widest = max(widest, clusters * (len(members) + 1.5) * _BAR_INCHES + 0.6)
        shown = [series.label for _, _, members in page for series in members]
        legend: list[tuple[str, Artist]] = [
            (label, Patch(**style.bar)) for label, style in styles.items() if label in shown
        ]
        legend += [(form_name(floor), Line2D([0, 1], [0, 0], **_floor(floor))) for floor in FLOORS]
        labels = ("difficulty k of the target", "honest LCS")
        with house_style():
            canvas = panel_grid(panels, columns, (widest, 1.8), labels, legend, _heading(data))
        pages.append(canvas)
    return _figures("lcs_by_k", pages, data)


def _bar_panel(
    members: Sequence[Series], styles: dict[str, Style], measure: Measure, axes: Axes
) -> None:
    rows = [row for series in members for row in series.rows]
    difficulties = sorted({row.k for row in rows}, key=lambda k: (k is None, k))
    width = min(_WIDEST_BAR, 0.84 / len(members))
    left = -width * len(members) / 2
    whisker: dict[str, Any] = {"elinewidth": 0.8, "capsize": min(2.0, 30 * width), "capthick": 0.8}
    for cluster, k in enumerate(difficulties):
        for place, series in enumerate(members):
            if found := mean_over_targets((row for row in series.rows if row.k == k), measure):
                middle = cluster + left + width * (place + 0.5)
                bar = {**styles[series.label].bar, "yerr": found.error, "error_kw": whisker}
                axes.bar(middle, found.mean, width, **bar)
        for floor in FLOORS:
            values = (row for row in rows if row.k == k)
            if found := mean_over_targets(values, partial(matrix_lcs, floor, "free_greedy")):
                reach = [cluster - 0.46, cluster + 0.46]
                axes.plot(reach, [found.mean] * 2, **_floor(floor))
    axes.set_xticks(range(len(difficulties)), [k_name(k) for k in difficulties])
    axes.set_xlim(-0.55, len(difficulties) - 0.45)
    axes.tick_params(axis="x", length=0)
    _share_scale(axes)


def _floor(floor: str) -> dict[str, Any]:
    """How matplotlib is told of a floor: a thin black line with a mark at its left end."""
    dashes, marker = _FLOOR_LINES[floor]
    line = {"color": "black", "linewidth": 0.7, "linestyle": dashes, "markevery": [0]}
    mark = {"marker": marker, "markersize": 4, "markeredgewidth": 0.7, "markerfacecolor": "white"}
    return {**line, **mark, "clip_on": False}  # a floor may be 0


def draw_anytime(data: ReportData, axis: Axis) -> list[Figure]:
    """Best honest LCS so far against a kind of cost, one panel per LM and N."""
    name = f"anytime_{'steps' if axis == 'step' else axis}"
    labels = (AXIS_UNITS[axis], "best honest LCS so far")
    return _figures(name, _draw_curves(data, axis, best_so_far, labels), data)


def draw_temperature(data: ReportData) -> list[Figure]:
    """The temperature of the methods that have one, one panel per LM and N."""
    pages = _draw_curves(data, "step", temperature, ("steps", "temperature τ"))
    return _figures("temperature", pages, data)


def _figures(name: str, pages: Sequence[Canvas], data: ReportData) -> list[Figure]:
    return [
        Figure(*block_texts(name, part, held=data.held_to), canvas=page)
        for part, page in enumerate(pages, start=1)
    ]


def best_so_far(row: Inversion, axis: Axis, budget: Budget) -> Path:
    """The best honest LCS after each evaluation within a budget."""
    points = points_within(row, budget)
    best = itertools.accumulate((point.lcs for point in points), max)
    return [float(getattr(point, axis)) for point in points], list(best)


def temperature(row: Inversion, axis: Axis, budget: Budget) -> Path:
    """The mean temperature at each evaluation that knows it."""
    points = [point for point in points_within(row, budget) if point.means.get("tau", 0) > 0]
    return [float(getattr(point, axis)) for point in points], [p.means["tau"] for p in points]


def mean_curve(paths: Sequence[tuple[str, Path]]) -> Curve | None:
    """The mean of paths, each with the id of its target; one that stopped keeps its last value."""
    paths = [(target, path) for target, path in paths if path[0]]
    if not paths:
        return None
    begin = max(positions[0] for _, (positions, _) in paths)
    every = np.unique([x for _, (positions, _) in paths for x in [begin, *positions] if x >= begin])
    xs = every[np.linspace(0, len(every) - 1, min(_POINTS, len(every))).round().astype(int)]
    by_target: dict[str, list[Any]] = {}
    for target, (positions, heights) in paths:
        latest = np.searchsorted(positions, xs, side="right") - 1
        by_target.setdefault(target, []).append(np.asarray(heights)[latest])
    values = np.array([np.mean(rows, axis=0) for rows in by_target.values()])  # (targets, points)
    count = len(values)
    errors = values.std(axis=0, ddof=1) / count**0.5 if count > 1 else np.zeros(len(xs))
    return Curve(xs, values.mean(axis=0), errors)


def _draw_curves(
    data: ReportData,
    axis: Axis,
    path: Callable[[Inversion, Axis, Budget], Path],
    labels: tuple[str, str],
) -> list[Canvas]:
    styles = styles_of(data.labels)
    found: list[tuple[set[str], Panel]] = []
    for title, group, members in data.places():
        curves = {}
        for series in members:
            paths = [(row.target_id, path(row, axis, group.budgets[-1])) for row in series.rows]
            if curve := mean_curve(paths):
                curves[series.label] = curve
        name = f"N={members[0].prompt_length}"
        draw = partial(_curve_panel, curves, styles, axis, path is best_so_far)
        panel = Panel(name if len(data.groups) == 1 else f"{title}, {name}", draw)
        found += [(set(curves), panel)] if curves else []
    pages = []
    for page in in_parts(found, _PANELS_PER_FIGURE):
        panels = [panel for _, panel in page]
        shown = set().union(*(names for names, _ in page))
        legend = [(n, Line2D([0], [0], **style.line)) for n, style in styles.items() if n in shown]
        columns = min(2, len(panels))
        with house_style():
            canvas = panel_grid(panels, columns, (3.4, 2.3), labels, legend, _heading(data))
        pages.append(canvas)
    return pages


def _curve_panel(
    curves: dict[str, Curve], styles: dict[str, Style], axis: Axis, is_share: bool, axes: Axes
) -> None:
    step: Any = "post" if is_share else None
    for place, (label, style) in enumerate(styles.items()):
        if label not in curves:
            continue
        curve = curves[label]
        every = max(1, len(curve.xs) // _MARKS)
        # Markers of different methods at different places, lest they cover each other.
        marks = (place * every // 3 % every, every)
        drawstyle = "steps-post" if is_share else "default"
        axes.plot(curve.xs, curve.means, **style.line, drawstyle=drawstyle, markevery=marks)
        if curve.errors.any():
            band: dict[str, Any] = {"color": style.colour, "alpha": 0.16, "linewidth": 0}
            ends = curve.means - curve.errors, curve.means + curve.errors
            axes.fill_between(curve.xs, *ends, **band, step=step)
    if axis == "token_passes":  # methods differ in it by orders of magnitude
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    if is_share:
        _share_scale(axes)
    else:
        axes.set_yscale("log")


def _share_scale(axes: Axes) -> None:
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])


def _heading(data: ReportData) -> str:
    """The LM, where there is but one."""
    return data.titled()[0][0] if len(data.groups) == 1 else ""
