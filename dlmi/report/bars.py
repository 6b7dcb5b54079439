"""Bars of honest LCS against difficulty, by method: one row per LM and N, one column per budget."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlmi.report.estimates import Measure, honest_lcs, mean_over_targets
from dlmi.report.loading import Group, Loaded, Series
from dlmi.report.naming import budget_name, form_name, group_titles, k_name
from dlmi.report.styles import (
    Drawing,
    Style,
    floor_line,
    house_style,
    legend_below,
    new_canvas,
    numbered,
    safe_text,
    styles_of,
)
from dlmi.rows import FLOORS, Inversion

_ROWS_PER_FIGURE = 4
_MOST_COLUMNS = 3
_BAR_INCHES = 0.045  # thinner bars cannot be told apart in print

_CAPTION = (
    "Honest LCS (best discrete prompt within the budget, free greedy decode) against the targets' "
    "difficulty k. Bars stand in the order of the legend; they are means over targets, seeds "
    "averaged first, and the whiskers are standard errors over targets (none for a single one). A "
    "target that stopped early keeps its value. Lines across a cluster: what the LM says with no "
    "prompt, after random tokens, and after the target itself repeated; means over all rows."
)


def draw_bars(loaded: Loaded) -> list[Drawing]:
    """All groups and lengths, a few rows to a figure."""
    labels = list(dict.fromkeys(label for group in loaded.groups for label in group.labels))
    styles = styles_of(labels)
    names = group_titles(loaded.groups)
    places = [
        (name, group, length)
        for name, group in zip(names, loaded.groups, strict=True)
        for length in group.prompt_lengths
    ]
    pages = [places[i : i + _ROWS_PER_FIGURE] for i in range(0, len(places), _ROWS_PER_FIGURE)]
    with house_style():
        drawn = [_draw_page(page, styles) for page in pages]
    return numbered("lcs_by_k", "Honest LCS by difficulty and method", _CAPTION, drawn)


def _draw_page(places: Sequence[tuple[str, Group, int]], styles: dict[str, Style]) -> Canvas:
    columns = min(_MOST_COLUMNS, max(len(group.budgets[1]) for _, group, _ in places))
    heights = [-(-len(group.budgets[1]) // columns) for _, group, _ in places]  # rows of a place
    rows = sum(heights)
    widest = max(_panel_inches(group, length) for _, group, length in places)
    canvas = new_canvas(max(6.8, columns * widest + 0.5), 2.0 * rows + 0.9)
    shown: dict[str, None] = {}
    for number, (name, group, length) in enumerate(places):
        axis, budgets = group.budgets
        members = [series for series in group.series if series.prompt_length == length]
        shown |= dict.fromkeys(series.label for series in members)
        for i, at in enumerate(budgets):
            row = sum(heights[:number]) + i // columns
            axes = canvas.add_subplot(rows, columns, row * columns + i % columns + 1)
            axes.set_title(safe_text(f"{name}, N={length}, {budget_name(axis, at)}", 44))
            _draw_panel(axes, members, styles, honest_lcs(axis, at))
            if i % columns == 0:
                axes.set_ylabel("honest LCS")
            if row == rows - 1:
                axes.set_xlabel("difficulty k of the target")
    handles: list[Any] = [Patch(**styles[label].bar) for label in styles if label in shown]
    handles += [Line2D([0, 1], [0, 0], **floor_line(floor)) for floor in FLOORS]
    texts = [safe_text(label) for label in styles if label in shown]
    legend_below(canvas, handles, texts + [form_name(floor) for floor in FLOORS])
    return canvas


def _panel_inches(group: Group, length: int) -> float:
    methods = sum(series.prompt_length == length for series in group.series)
    return len({row.k for row in group.rows}) * (methods + 1.5) * _BAR_INCHES + 0.5


def _draw_panel(
    axes: Axes, members: Sequence[Series], styles: dict[str, Style], measure: Measure
) -> None:
    difficulties = sorted(
        {row.k for series in members for row in series.rows}, key=lambda k: (k is None, k)
    )
    width = 0.84 / len(members)
    for place, series in enumerate(members):
        style = styles[series.label]
        for cluster, k in enumerate(difficulties):
            found = mean_over_targets((row for row in series.rows if row.k == k), measure)
            if found is None:
                continue
            axes.bar(
                cluster - 0.42 + width * (place + 0.5),
                found.mean,
                width,
                yerr=found.error,
                **style.bar,
                error_kw={"elinewidth": 0.8, "capsize": min(2.0, 30 * width), "capthick": 0.8},
            )
    for cluster, k in enumerate(difficulties):
        rows = [row for series in members for row in series.rows if row.k == k]
        for floor, value in _floor_values(rows):
            reach = [cluster - 0.46, cluster + 0.46]
            axes.plot(reach, [value, value], **floor_line(floor))
    axes.set_xticks(range(len(difficulties)), [k_name(k) for k in difficulties])
    axes.set_xlim(-0.55, len(difficulties) - 0.45)
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.tick_params(axis="x", length=0)


def _floor_values(rows: Iterable[Inversion]) -> list[tuple[str, float]]:
    rows = list(rows)
    found = []
    for floor in FLOORS:
        values = [r.lcs_matrix[floor]["free_greedy"] for r in rows if floor in r.lcs_matrix]
        if values:
            found.append((floor, statistics.fmean(values)))
    return found
