"""Violins of gradient variance and bias, by estimator."""

import math
from collections.abc import Sequence
from typing import cast

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from dlmi.report.gradient_comparison import labels_of, values_of
from dlmi.report.gradient_sets import GradientSet
from dlmi.report.styles import Drawing, house_style, new_canvas, safe_text, styles_of

_MOST_TICKS = 6

# Column of a gradient row, and what its panel is called. The first two are the paper's; the others
# do not change when a gradient is merely scaled.
STATISTICS = {
    "variance_max": "largest variance of a logit",
    "bias_max": "largest |bias| of a logit",
    "relative_variance": "variance / |mean|²",
    "bias_over_norm": "|bias| / |truth|",
}


def draw_violins(sets: Sequence[GradientSet]) -> list[Drawing]:
    """One figure per set; nothing for a set without values above 0."""
    drawings = []
    for number, gradients in enumerate(sets):
        suffix = "" if len(sets) == 1 else f"_{number + 1}"
        with house_style():
            drawings += _draw_set(gradients, suffix)
    return drawings


def _draw_set(gradients: GradientSet, suffix: str) -> list[Drawing]:
    estimators = labels_of(gradients.rows)
    shown = {
        statistic: {e: values_of(gradients.rows, e, statistic) for e in estimators}
        for statistic in STATISTICS
    }
    shown = {
        statistic: values
        for statistic, values in shown.items()
        if any(value > 0 for found in values.values() for value in found)
    }
    if not shown:
        return []
    rows = -(-len(shown) // 2)
    columns = min(2, len(shown))
    canvas = new_canvas(6.8, rows * (0.75 + 0.26 * len(estimators)))
    left_out = 0
    for place, (statistic, values) in enumerate(shown.items()):
        axes = canvas.add_subplot(rows, columns, place + 1)
        axes.set_title(STATISTICS[statistic])
        left_out += _draw_panel(axes, estimators, values)
        if place % columns:
            axes.set_yticklabels([])
    caption = (
        f"Gradient estimators on {gradients.title}. Logarithmic scale; violins over targets, seeds "
        "and steps, with the extremes and, as a dot, the mean of the logarithms. Variance and bias "
        "of a logit are the largest over all logits, as in the paper, and shrink with the "
        "gradient itself; the ratios are free of scale, with the sampling noise subtracted."
    )
    if left_out:
        caption += f" {left_out} values that are 0 or below cannot be drawn and are left out."
    title = "Variance and bias of gradient estimators"
    return [Drawing(f"gradients{suffix}", title, caption, canvas)]


def _draw_panel(axes: Axes, estimators: Sequence[str], values: dict[str, list[float]]) -> int:
    """Draw a statistic; gives how many values a logarithm does not have."""
    styles = styles_of(estimators)
    left_out = 0
    for place, estimator in enumerate(estimators):
        found = [math.log10(value) for value in values[estimator] if value > 0]
        left_out += len(values[estimator]) - len(found)
        if not found:
            continue
        colour = styles[estimator].colour
        if len(found) > 2 and max(found) - min(found) > 1e-9:
            parts = axes.violinplot(
                [found], [place], orientation="horizontal", widths=0.8, showextrema=False
            )
            for body in cast(list[PolyCollection], parts["bodies"]):
                body.set(facecolor=colour, edgecolor="black", alpha=0.75, linewidth=0.6)
        axes.plot(
            [min(found), max(found)], [place, place], color="black", linewidth=0.8, marker="|"
        )
        centre = sum(found) / len(found)
        axes.plot(centre, place, color="white", marker="o", markeredgecolor="black", markersize=3.5)
    axes.set_yticks(range(len(estimators)), [safe_text(e, 28) for e in estimators])
    axes.set_ylim(len(estimators) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    positions, labels = _log_ticks(*axes.get_xlim())
    axes.set_xticks(positions, labels)
    return left_out


def _log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks between two exponents of ten: powers, or numbers where there are few of them."""
    exponents = range(math.ceil(low), math.floor(high) + 1)
    if len(exponents) > 2:
        every = -(-len(exponents) // _MOST_TICKS)
        shown = [exponent for exponent in exponents if exponent % every == 0]
        return [float(exponent) for exponent in shown], [f"$10^{{{x}}}$" for x in shown]
    values = [m * 10.0**x for x in range(math.floor(low), math.ceil(high)) for m in (1, 2, 5)]
    inside = [value for value in values if low <= math.log10(value) <= high]
    if len(inside) < 2:
        inside = [float(f"{10 ** (low + part * (high - low)):.3g}") for part in (0.2, 0.8)]
    return [math.log10(value) for value in inside], [f"{value:g}" for value in inside]
