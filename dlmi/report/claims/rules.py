"""The paper's claims about LCS and prompts, each as a rule that gives its findings in a view."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dlmi.report.claims.verdicts import NEGLIGIBLE, Findings, above, below, between, decides
from dlmi.report.claims.views import MetricView, tau_of
from dlmi.report.estimates import (
    Estimate,
    NamedEstimates,
    by_target,
    differences,
    mean_gain,
    mean_over_targets,
    slope,
    unpaired,
)
from dlmi.report.loading import Series
from dlmi.report.names import Role
from dlmi.report.result_files import Budget
from dlmi.report.tables import log_perplexity
from dlmi.rows import Inversion

LONG_PROMPT = 80
LONG_RUN = 2048
POOR = 0.2  # "below ~20%"
NEAR_PERFECT = 0.9
BARELY = 0.1
SODA_FLAT_AFTER = 200
OVERLAP_BOUND = 0.2
TEMPERATURE_STEPS = 256


@decides("1a")
def _dlmi_is_best(view: MetricView) -> Findings:
    return (above(*gap) for gap in view.gaps(view.find("DLMI"), view.others))


@decides("1b")
def _dlmi_is_near_perfect(view: MetricView) -> Findings:
    axis, at = view.budget
    if view.length >= LONG_PROMPT and axis == "step" and at >= LONG_RUN:
        for mean in view.means("DLMI"):
            yield above(*mean, NEAR_PERFECT, margin=0)


@decides("2")
def _reinforce_is_poor(view: MetricView) -> Findings:
    return (below(*mean, POOR) for mean in view.means("REINFORCE"))


@decides("3a")
def _gbda_barely_beats_reinforce(view: MetricView) -> Findings:
    for gap in view.gaps(view.find_all("GBDA"), view.find("REINFORCE")):
        yield between(*gap, -NEGLIGIBLE, BARELY)


@decides("3b")
def _gbda_is_below_dlmi(view: MetricView) -> Findings:
    return (above(*gap) for gap in view.gaps(view.find("DLMI-TF"), view.find_all("GBDA")))


@decides("3c")
def _gbda_gap_grows(view: MetricView) -> Findings:
    for dlmi in view.find("DLMI-TF"):
        for gbda in view.find_all("GBDA"):
            gaps = differences(dlmi.rows, gbda.rows, view.lcs(view.budget))
            if rise := _over_k(dlmi, gaps):
                name = f"rise of {dlmi.label} - {gbda.label} from lowest to highest k"
                yield above(f"{name} at {view.place}", rise)


@decides("4")
def _temperature_matters_most(view: MetricView) -> Findings:
    for forced, free in _forced_and_free(view):
        by_forcing = differences(forced.rows, free.rows, view.lcs(view.budget))
        for fixed in view.find_all("GBDA"):
            by_temperature = differences(free.rows, fixed.rows, view.lcs(view.budget))
            if found := mean_gain(by_forcing, by_temperature):
                names = f"({free.label} - {fixed.label}) - ({forced.label} - {free.label})"
                yield above(f"{names} at {view.place}", found)


@decides("5")
def _forcing_saves_steps(view: MetricView) -> Findings:
    for forced, free in _forced_and_free(view):
        yield from (above(*gap) for gap in view.gaps([forced], [free]))


@decides("6a")
def _longer_prompts_are_better(view: MetricView) -> Findings:
    low, high = view.group.prompt_lengths[0], view.group.prompt_lengths[-1]
    for long in view.series if view.length == high > low else []:
        short = [s for s in view.everyone if (s.label, s.prompt_length) == (long.label, low)]
        for _, gap in view.gaps([long], short):
            yield above(f"{long.label}, N={high} - N={low}, {view.budget}", gap)


@decides("6b")
def _dlmi_leads_on_hard_targets(view: MetricView) -> Findings:
    difficulties = sorted({row.k for row in view.group.rows if row.k is not None})
    hard = difficulties[len(difficulties) // 2 :]  # the harder half

    def only_hard(members: Sequence[Series]) -> list[Series]:
        return [replace(s, rows=tuple(row for row in s.rows if row.k in hard)) for s in members]

    for name, gap in view.gaps(only_hard(view.find("DLMI")), only_hard(view.others)):
        if view.length >= LONG_PROMPT:
            yield above(f"k >= {hard[0]}: {name}", gap)


@decides("7")
def _larger_is_easier(views: tuple[MetricView, MetricView]) -> Findings:
    small, large = views
    measure = small.lcs(small.budget)
    for one in small.find("DLMI"):
        for other in large.find("DLMI"):
            # Each LM has its own targets, so this comparison is not paired.
            if gap := unpaired(by_target(other.rows, measure), by_target(one.rows, measure)):
                yield above(f"{one.label} at {small.place}", gap)


@decides("8a")
def _dlmi_is_robust(view: MetricView) -> Findings:
    return (above(*fall, -BARELY, margin=0) for fall in _falls(view, "DLMI"))


@decides("8b")
def _soda_degrades(view: MetricView) -> Findings:
    return (below(*fall, 0.0, margin=NEGLIGIBLE) for fall in _falls(view, "SODA"))


@decides("8c")
def _soda_is_flat(view: MetricView) -> Findings:
    for soda in view.find("SODA"):
        is_long = max(row.steps for row in soda.rows) >= 2 * SODA_FLAT_AFTER
        before = Budget("step", SODA_FLAT_AFTER)
        early, late = (by_target(soda.rows, view.lcs(b)) for b in (before, view.budget))
        if is_long and (found := mean_gain(early, late)):
            name = f"{soda.label}, N={view.length}, gain after {SODA_FLAT_AFTER} steps"
            yield below(name, found, NEGLIGIBLE)


@decides("9")
def _more_steps_do_no_harm(view: MetricView) -> Findings:
    first, last = view.group.budgets[0], view.budget
    for series in view.find_all("DLMI", "DLMI-TF") if first != last else []:
        early, late = (by_target(series.rows, view.current_lcs(b)) for b in (first, last))
        if found := mean_gain(early, late):
            name = f"{series.label}, N={view.length}, {last.at:.12g} - {first}"
            yield above(name, found, -NEGLIGIBLE, margin=0)


@decides("13")
def _higher_tau_is_better(view: MetricView) -> Findings:
    for gap in view.gaps(view.find("DLMI-TF", tau=100), view.find("DLMI-TF", tau=1)):
        if view.length >= LONG_PROMPT:
            yield above(*gap)


@decides("14")
def _temperature_falls(view: MetricView) -> Findings:
    def log_ratio(row: Inversion) -> float | None:
        known = [p for p in row.trace if p.step <= TEMPERATURE_STEPS]
        taus = [tau for p in known if (tau := p.means.get("tau", 0)) > 0]
        return math.log10(taus[-1] / taus[0]) if len(taus) > 1 else None

    for series in view.find_all("DLMI", "DLMI-TF"):
        if found := mean_over_targets(series.rows, log_ratio):
            yield below(f"log10 of tau's change, {series.label}, N={view.length}", found, 0.0)


@decides("15")
def _overlap_is_small(view: MetricView) -> Findings:
    for series in view.series:
        if found := mean_over_targets(series.rows, lambda row: row.overlap_ratio):
            yield below(f"{series.label}, N={view.length}", found, OVERLAP_BOUND)


@decides("16")
def _perplexity_is_huge(view: MetricView) -> Findings:
    rows = view.group.rows
    largest = max(i for row in rows for i in (*row.prompt_ids, *row.target_ids, *row.output_ids))
    bound = math.log(largest + 1)
    for series in view.series:
        if found := mean_over_targets(series.rows, log_perplexity):
            name = f"ln perplexity, {series.label}, N={view.length} (ln V >= {bound:.3g})"
            yield above(name, found, bound, margin=0)


def _forced_and_free(view: MetricView) -> Iterator[tuple[Series, Series]]:
    """DLMI and DLMI-TF of the same tau0."""
    for free in view.find("DLMI-TF"):
        for forced in view.find("DLMI", tau_of(free)):
            yield forced, free


def _over_k(series: Series, values: Mapping[str, float]) -> Estimate | None:
    """Change from the lowest to the highest k, along the least-squares line."""
    difficulties = {row.target_id: row.k for row in series.rows}
    return slope([(k, values[t]) for t, k in difficulties.items() if k is not None and t in values])


def _falls(view: MetricView, role: Role) -> NamedEstimates:
    for series in view.find(role):
        if fall := _over_k(series, by_target(series.rows, view.lcs(view.budget))):
            yield f"{series.label} from lowest to highest k at {view.place}", fall
