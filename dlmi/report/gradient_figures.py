"""Violins of gradient variance and bias, by estimator."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import cast

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from dlmi.report.blocks import Figure, block_texts
from dlmi.report.gradient_comparison import labels_of, values_of
from dlmi.report.gradient_sets import GradientSet
from dlmi.report.styles import Panel, house_style, panel_grid, safe_text, styles_of

# Column of a gradient row, and what its panel is called. The first two are the paper's; the others
# do not change when a gradient is merely scaled.
STATISTICS = {
    "variance_max": "largest variance of a logit",
    "bias_max": "largest |bias| of a logit",
    "relative_variance": "variance / |mean|²",
    "bias_over_norm": "|bias| / |truth|",
}


def draw_violins(sets: Sequence[GradientSet]) -> list[Figure]:
    """One figure per set; nothing for a set without values above 0."""
    drawings = []
    for part, gradients in enumerate(sets, start=1):
        estimators = labels_of(gradients.rows)
        values = {
            name: {e: values_of(gradients.rows, e, name) for e in estimators} for name in STATISTICS
        }
        drawn = {name: list(itertools.chain(*found.values())) for name, found in values.items()}
        shown = [name for name in values if max(drawn[name], default=0) > 0]
        if not shown:
            continue
        panels = [
            Panel(STATISTICS[name], partial(_draw_panel, values[name], i % 2 == 0))
            for i, name in enumerate(shown)
        ]
        with house_style():
            size = (3.4, 0.5 + 0.26 * len(estimators))
            canvas = panel_grid(panels, min(2, len(panels)), size)
        lost = sum(value <= 0 for name in shown for value in drawn[name])
        left_out = f" {lost} values that are 0 or below cannot be drawn and are left out."
        filled = {"measured_on": gradients.title, "left_out": left_out if lost else ""}
        drawings.append(Figure(*block_texts("gradients", part, **filled), canvas=canvas))
    return drawings


def _draw_panel(values: dict[str, list[float]], has_names: bool, axes: Axes) -> None:
    for place, (estimator, style) in enumerate(styles_of(list(values)).items()):
        found = [math.log10(value) for value in values[estimator] if value > 0]
        if not found:
            continue
        ends = [min(found), max(found)]
        if len(found) > 2 and ends[1] - ends[0] > 1e-9:
            parts = axes.violinplot(
                [found], [place], orientation="horizontal", widths=0.8, showextrema=False
            )
            for body in cast(list[PolyCollection], parts["bodies"]):
                body.set(facecolor=style.colour, edgecolor="black", alpha=0.75, linewidth=0.6)
        axes.plot(ends, [place, place], color="black", linewidth=0.8, marker="|")
        centre = sum(found) / len(found)
        axes.plot(centre, place, color="white", marker="o", markeredgecolor="black", markersize=3.5)
    names = [safe_text(estimator, 1.8) if has_names else "" for estimator in values]
    axes.set_yticks(range(len(values)), names)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda exponent, _: f"{10**exponent:.2g}")
