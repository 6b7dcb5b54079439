"""The paper's claims as rules: each gives the numbers that its claim bounds, in a view."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from dlmi.gradient_rows import GradientRow
from dlmi.report.claims.views import Metric, MetricView, tau_of
from dlmi.report.estimates import (
    Estimate,
    Measure,
    NamedEstimates,
    by_target,
    differences,
    known,
    mean_gain,
    slope,
    unpaired,
)
from dlmi.report.gradient_sets import GradientSet
from dlmi.report.loading import Series
from dlmi.report.names import Role
from dlmi.report.result_files import Budget
from dlmi.report.tables import log_perplexity
from dlmi.rows import Inversion

LONG_RUN = 2048
SODA_FLAT_AFTER = 200
TEMPERATURE_STEPS = 256

# Labels of estimators as gradient rows have them.
REINFORCE = "REINFORCE"
FIXED_LOW, FIXED_HIGH = "GS tau=1", "GS tau=100"
LEARNED = ("GS L tau0=1", "GS L tau0=100", "GS D+L tau0=1", "GS D+L tau0=100")
_HIGH_AND_LOW = ((LEARNED[1], LEARNED[0]), (LEARNED[3], LEARNED[2]))

Rule = Callable[..., NamedEstimates]

# By the numbers of the claims. These compare two methods, or bound a mean; the others are below.
RULES: dict[str, Rule] = {
    "1a": lambda view: view.gaps(view.find("DLMI"), view.others),
    "2": lambda view: view.means(view.find("REINFORCE")),
    "3a": lambda view: view.gaps(view.find_all("GBDA"), view.find("REINFORCE")),
    "3b": lambda view: view.gaps(view.find("DLMI-TF"), view.find_all("GBDA")),
    "13": lambda view: view.gaps(view.find("DLMI-TF", tau=100), view.find("DLMI-TF", tau=1)),
    "15": lambda view: view.means(view.series, lambda row: row.overlap_ratio),
}


def decides(number: str, **arguments: Any) -> Callable[[Rule], Rule]:
    """Enter a rule into `RULES` by the number of its claim; `arguments` go to the rule."""

    def enter(rule: Rule) -> Rule:
        RULES[number] = partial(rule, **arguments)
        return rule

    return enter


@decides("1b")
def _dlmi_is_near_perfect(view: MetricView) -> NamedEstimates:
    is_long = view.budget.axis == "step" and view.budget.at >= LONG_RUN
    return view.means(view.find("DLMI") if is_long else [])


@decides("3c")
def _gbda_gap_grows(view: MetricView) -> NamedEstimates:
    for dlmi, gbda in product(view.find("DLMI-TF"), view.find_all("GBDA")):
        if rise := _over_k(dlmi, differences(dlmi.rows, gbda.rows, view.measure)):
            name = f"rise of {dlmi.label} - {gbda.label} from lowest to highest k"
            yield f"{name} at {view.place}", rise


@decides("4")
def _temperature_matters_most(view: MetricView) -> NamedEstimates:
    for (forced, free), fixed in product(_forced_and_free(view), view.find_all("GBDA")):
        by_forcing = differences(forced.rows, free.rows, view.measure)
        by_temperature = differences(free.rows, fixed.rows, view.measure)
        if found := mean_gain(by_forcing, by_temperature):
            names = f"({free.label} - {fixed.label}) - ({forced.label} - {free.label})"
            yield f"{names} at {view.place}", found


@decides("5")
def _forcing_saves_steps(view: MetricView) -> NamedEstimates:
    for forced, free in _forced_and_free(view):
        yield from view.gaps([forced], [free])


@decides("6a")
def _longer_prompts_are_better(view: MetricView) -> NamedEstimates:
    low, high = view.group.prompt_lengths[0], view.group.prompt_lengths[-1]
    for long in view.series if view.length == high > low else []:
        short = [s for s in view.everyone if (s.label, s.prompt_length) == (long.label, low)]
        for _, gap in view.gaps([long], short):
            yield f"{long.label}, N={high} - N={low}, {view.budget}", gap


@decides("6b")
def _dlmi_leads_on_hard_targets(view: MetricView) -> NamedEstimates:
    difficulties = sorted({row.k for row in view.group.rows if row.k is not None})
    hard = difficulties[len(difficulties) // 2 :]  # the harder half

    def of_hard(row: Inversion) -> float:
        return view.measure(row) if row.k in hard else math.nan

    for name, gap in view.gaps(view.find("DLMI"), view.others, of_hard):
        yield f"k >= {hard[0]}: {name}", gap


@decides("7")
def _larger_is_easier(views: tuple[MetricView, MetricView]) -> NamedEstimates:
    small, large = views
    for one, other in product(small.find("DLMI"), large.find("DLMI")):
        # Each LM has its own targets, so this comparison is not paired.
        values = [by_target(series.rows, small.measure).values() for series in (other, one)]
        if gap := unpaired(*values):
            yield f"{one.label} at {small.place}", gap


@decides("8a", role="DLMI")
@decides("8b", role="SODA")
def _change_over_k(view: MetricView, role: Role) -> NamedEstimates:
    for series in view.find(role):
        if change := _over_k(series, by_target(series.rows, view.measure)):
            yield f"{series.label} from lowest to highest k at {view.place}", change


@decides("8c")
def _soda_is_flat(view: MetricView) -> NamedEstimates:
    long = [s for s in view.find("SODA") if max(r.steps for r in s.rows) >= 2 * SODA_FLAT_AFTER]
    gain = _gain(view.lcs, Budget("step", SODA_FLAT_AFTER), view.budget)
    return view.means(long, gain, f"gain after {SODA_FLAT_AFTER} steps, ")


@decides("9")
def _more_steps_do_no_harm(view: MetricView) -> NamedEstimates:
    first, last = view.group.budgets[0], view.budget
    members = view.find_all("DLMI", "DLMI-TF") if first != last else []
    return view.means(members, _gain(view.current_lcs, first, last), f"{last.at:.12g} - {first}, ")


@decides("14")
def _temperature_falls(view: MetricView) -> NamedEstimates:
    def log_ratio(row: Inversion) -> float:
        known = [p for p in row.trace if p.step <= TEMPERATURE_STEPS]
        taus = [tau for p in known if (tau := p.means.get("tau", 0)) > 0]
        return math.log10(taus[-1] / taus[0]) if len(taus) > 1 else math.nan

    return view.means(view.find_all("DLMI", "DLMI-TF"), log_ratio, "log10 of tau's change, ")


@decides("16")
def _perplexity_is_huge(view: MetricView) -> NamedEstimates:
    rows = view.group.rows
    largest = max(i for row in rows for i in (*row.prompt_ids, *row.target_ids, *row.output_ids))
    bound = math.log(largest + 1)
    name = f"ln perplexity - ln V (>= {bound:.3g}), "
    return view.means(view.series, lambda row: log_perplexity(row) - bound, name)


@dataclass(frozen=True)
class GradientView:
    """Gradient rows through a pair of columns.

    The paper's are the largest variance and bias of a logit, which shrink with the gradient itself.
    So claims are decided on columns that are free of scale; the paper's are shown next to them.
    """

    gradients: GradientSet
    variance: str = "relative_variance"
    bias: str = "bias_over_norm"


@decides("10", pairs=list(product([REINFORCE], [FIXED_LOW, FIXED_HIGH, *LEARNED])), of=["variance"])
@decides("11", pairs=[(FIXED_HIGH, FIXED_LOW)], of=["variance", "bias"])
@decides("12a", pairs=list(product(LEARNED, [FIXED_LOW])), of=["variance", "bias"])
@decides("12b", pairs=_HIGH_AND_LOW, of=["bias"])
def _log_ratio(
    view: GradientView,
    pairs: Sequence[tuple[str, str]],
    of: Sequence[str],
    name: str = "log10 {column}, {first} over {second}",
    summary: Callable[[list[float]], float] = statistics.fmean,
) -> NamedEstimates:
    """log10 of one estimator's statistic over another's; `summary` is of a target's rows."""
    for (first, second), column in product(pairs, (getattr(view, each) for each in of)):

        def logarithm(row: GradientRow, column: str = column) -> float:
            value = known(getattr(row, column).value)
            return math.log10(value) if value > 0 else math.nan

        one, other = (
            by_target([r for r in view.gradients.rows if r.estimator == label], logarithm, summary)
            for label in (first, second)
        )
        if found := mean_gain(other, one):
            yield name.format(column=column, first=first, second=second), found


@decides("12c")
def _range_is_smaller(view: GradientView) -> NamedEstimates:
    name = "decades of {column}, {first} - {second}"
    return _log_ratio(view, _HIGH_AND_LOW, ["variance"], name, lambda v: max(v) - min(v))


def _forced_and_free(view: MetricView) -> list[tuple[Series, Series]]:
    """DLMI and DLMI-TF of the same tau0."""
    every = view.find("DLMI-TF")
    return [(forced, free) for free in every for forced in view.find("DLMI", tau_of(free))]


def _gain(metric: Metric, first: Budget, last: Budget) -> Measure:
    """What a row gains between two budgets."""
    return lambda row: metric(last)(row) - metric(first)(row)


def _over_k(series: Series, values: Mapping[str, float]) -> Estimate:
    """Change from the lowest to the highest k, along the least-squares line."""
    difficulties = {row.target_id: row.k for row in series.rows}
    return slope([(k, values[t]) for t, k in difficulties.items() if k is not None and t in values])
