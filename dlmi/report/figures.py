"""Figures: bars of LCS over difficulty, curves over a run, violins of gradient estimators."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy import stats

from dlmi.report.blocks import Figure, block_texts, in_parts
from dlmi.report.estimates import Measure, honest_lcs, mean_over_targets
from dlmi.report.gradient_sets import GradientSet, values_of
from dlmi.report.loading import ReportData, Series, points_within
from dlmi.report.names import form_name
from dlmi.report.result_files import AXIS_UNITS, Axis, Budget
from dlmi.report.styles import Panel, Style, draw_panels, safe_text, styles_of
from dlmi.report.tables import matrix_lcs
from dlmi.rows import FLOORS, Inversion, TracePoint

_PANELS_PER_FIGURE = 4
_PANEL_INCHES = 1.55
_BAR_INCHES = 0.045  # thinner bars cannot be told apart in print
_WIDEST_BAR = 0.3  # of the space for one difficulty
_FLOOR_LINES = {"no_prompt": ("-", "o"), "random_prompt": (":", "x"), "copy_prompt": ("--", "s")}
_CURVE_POINTS = 160
_MARKS = 7  # markers along a curve
# Columns of a gradient row with the titles of their panels. The first two are the paper's; the
# others do not depend on the gradient's scale.
_STATISTICS = {
    "variance_max": "largest variance of a logit",
    "bias_max": "largest |bias| of a logit",
    "relative_variance": "variance / |mean|²",
    "bias_over_norm": "|bias| / |truth|",
}

Heights = Callable[[Sequence[TracePoint]], list[float]]


class Curve(NamedTuple):
    """A mean over targets (seeds averaged first) along a run."""

    xs: NDArray[np.float64]
    means: NDArray[np.float64]
    errors: NDArray[np.float64]  # standard errors; 0 for a single target


def draw_bars(data: ReportData) -> list[Figure]:
    """Honest LCS by difficulty: a panel for each LM, N and budget."""
    styles = styles_of(data.labels)
    panels = []
    width = 0.0
    for group, members in data.places():
        place = f"{group.title}, N={members[0].prompt_length}"
        for budget in group.budgets:
            draw = partial(_bar_panel, members, styles, honest_lcs(budget))
            shown = [*(series.label for series in members), *map(form_name, FLOORS)]
            panels.append(Panel(place, str(budget), shown, draw))
        clusters = len({row.k for series in members for row in series.rows})
        width = max(width, clusters * (len(members) + 1.5) * _BAR_INCHES + 0.6)
    floors = {form_name(floor): Line2D([0, 1], [0, 0], **_floor(floor)) for floor in FLOORS}
    legend = {**{label: Patch(**style.bar) for label, style in styles.items()}, **floors}
    labels = ("difficulty k of the target", "honest LCS")
    return _figures("lcs_by_k", data, panels, labels, legend, width)


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
            of_k = (row for row in rows if row.k == k)
            if found := mean_over_targets(of_k, partial(matrix_lcs, floor, "free_greedy")):
                reach = [cluster - 0.46, cluster + 0.46]
                axes.plot(reach, [found.mean] * 2, **_floor(floor))
    names = ["text" if k is None else str(k) for k in difficulties]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.tick_params(axis="x", length=0)


def _floor(floor: str) -> dict[str, Any]:
    """Matplotlib's arguments for a floor: a thin black line with a marker at its left end."""
    dashes, marker = _FLOOR_LINES[floor]
    line = {"color": "black", "linewidth": 0.7, "linestyle": dashes, "markevery": [0]}
    mark = {"marker": marker, "markersize": 4, "markeredgewidth": 0.7, "markerfacecolor": "white"}
    return {**line, **mark, "clip_on": False}  # a floor may be 0


def _figures(
    name: str,
    data: ReportData,
    panels: Sequence[Panel],
    labels: tuple[str, str],
    legend: Mapping[str, Artist],
    width: float = 0.0,
) -> list[Figure]:
    """A few panels per figure, each figure with the part of the legend that its panels show."""
    figures = []
    for part, page in enumerate(in_parts(panels, _PANELS_PER_FIGURE), start=1):
        shown = set().union(*(panel.shown for panel in page))
        entries = {label: artist for label, artist in legend.items() if label in shown}
        canvas = draw_panels(page, _PANEL_INCHES, labels, entries, width)
        figures.append(Figure(*block_texts(name, part, held=data.held_to), canvas=canvas))
    return figures


def draw_anytime(data: ReportData, axis: Axis) -> list[Figure]:
    """Best honest LCS so far against a kind of cost, one panel per LM and N."""
    name = f"anytime_{'steps' if axis == 'step' else axis}"
    return _draw_curves(name, data, axis, best_so_far, "best honest LCS so far")


def draw_temperature(data: ReportData) -> list[Figure]:
    """The temperature of the methods that have one, one panel per LM and N."""
    return _draw_curves("temperature", data, "step", temperature, "temperature τ")


def best_so_far(points: Sequence[TracePoint]) -> list[float]:
    """The best honest LCS after each evaluation."""
    return list(itertools.accumulate((point.lcs for point in points), max))


def temperature(points: Sequence[TracePoint]) -> list[float]:
    """The mean temperature at each evaluation; NaN where it is not known."""
    return [point.means.get("tau") or math.nan for point in points]


def mean_curve(
    rows: Sequence[Inversion], heights: Heights, axis: Axis, last: Budget
) -> Curve | None:
    """The mean over rows up to a budget; one that stopped keeps its last value."""
    paths = []  # of each row that has one, its target, positions and heights
    for row in rows:
        points = points_within(row, last)
        values = np.array(heights(points), dtype=float)
        is_known = np.isfinite(values)
        if is_known.any():
            positions = np.array([getattr(point, axis) for point in points], dtype=float)
            paths.append((row.target_id, positions[is_known], values[is_known]))
    if not paths:
        return None
    every = np.unique(np.concatenate([positions for _, positions, _ in paths]))
    every = every[every >= max(positions[0] for _, positions, _ in paths)]
    xs = every[np.linspace(0, len(every) - 1, min(_CURVE_POINTS, len(every))).round().astype(int)]
    seeds = defaultdict(list)
    for target, positions, values in paths:
        seeds[target].append(values[np.searchsorted(positions, xs, side="right") - 1])
    means = np.array([np.mean(found, axis=0) for found in seeds.values()])  # (targets, points)
    errors = stats.sem(means, axis=0) if len(means) > 1 else np.zeros(len(xs))
    return Curve(xs, means.mean(axis=0), errors)


def _draw_curves(
    name: str, data: ReportData, axis: Axis, heights: Heights, label: str
) -> list[Figure]:
    styles, panels = styles_of(data.labels), []
    for group, members in data.places():
        found = {s.label: mean_curve(s.rows, heights, axis, group.budgets[-1]) for s in members}
        curves = {label: curve for label, curve in found.items() if curve}
        draw = partial(_curve_panel, curves, styles, axis, heights is best_so_far)
        if curves:
            panels.append(Panel(group.title, f"N={members[0].prompt_length}", curves, draw))
    legend = {label: Line2D([], [], **style.line) for label, style in styles.items()}
    return _figures(name, data, panels, (AXIS_UNITS[axis], label), legend)


def _curve_panel(
    curves: dict[str, Curve], styles: dict[str, Style], axis: Axis, is_lcs: bool, axes: Axes
) -> None:
    """LCS as a step function from 0; anything else on a logarithmic scale."""
    drawstyle, step = ("steps-post", "post") if is_lcs else ("default", None)
    for place, (label, (xs, means, errors)) in enumerate(curves.items()):
        style, every = styles[label].line, max(1, len(xs) // _MARKS)
        # Markers of different methods at different places, so that none covers another.
        marks = (place * every // 3 % every, every)
        axes.plot(xs, means, **style, drawstyle=drawstyle, markevery=marks, clip_on=False)
        if errors.any():
            band: dict[str, Any] = {"color": style["color"], "alpha": 0.16, "linewidth": 0}
            axes.fill_between(xs, means - errors, means + errors, **band, step=cast(Any, step))
    if axis == "token_passes":  # methods differ in it by orders of magnitude
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    if not is_lcs:
        axes.set_yscale("log")


def draw_violins(sets: Sequence[GradientSet]) -> list[Figure]:
    """One figure per set; nothing for a set without values above 0."""
    drawings = []
    for part, gradients in enumerate(sets, start=1):
        values = {name: values_of(gradients.rows, name) for name in _STATISTICS}
        every = {name: [*itertools.chain(*found.values())] for name, found in values.items()}
        panels = [
            Panel("", title, values[name], partial(_violin_panel, values[name]))
            for name, title in _STATISTICS.items()
            if max(every[name], default=0) > 0
        ]
        if not panels:
            continue
        canvas = draw_panels(panels, 0.5 + 0.2 * len(panels[0].shown))
        lost = sum(value <= 0 for found in every.values() for value in found)
        left_out = f" {lost} values that are 0 or below cannot be drawn and are left out."
        filled = {"measured_on": gradients.title, "left_out": left_out if lost else ""}
        drawings.append(Figure(*block_texts("gradients", part, **filled), canvas=canvas))
    return drawings


def _violin_panel(values: dict[str, list[float]], axes: Axes) -> None:
    for place, (estimator, style) in enumerate(styles_of(list(values)).items()):
        found = np.log10([value for value in values[estimator] if value > 0])
        if len(found) > 2 and np.ptp(found) > 1e-9:
            shape: dict[str, Any] = {"orientation": "horizontal", "widths": 0.8}
            parts = axes.violinplot(found, [place], **shape, showextrema=False)
            [body] = cast(list[PolyCollection], parts["bodies"])
            colours = {"facecolor": style.line["color"], "edgecolor": "black"}
            body.set(**colours, alpha=0.75, linewidth=0.6)
        if len(found):
            look: dict[str, Any] = {"fmt": "o", "color": "black", "markerfacecolor": "white"}
            centre = found.mean()
            ends = [[centre - found.min()], [found.max() - centre]]
            axes.errorbar(centre, place, xerr=ends, **look, linewidth=0.8, capsize=2.5)
    axes.set_yticks(range(len(values)), [safe_text(estimator, 1.4) for estimator in values])
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda exponent, _: f"{10**exponent:.2g}")
