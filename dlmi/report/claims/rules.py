"""The paper's claims about LCS and prompts, each as a rule that gives its findings in a view."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dlmi.report.claims.verdicts import NEGLIGIBLE, Finding, above, below, between, claim
from dlmi.report.claims.views import MetricView, place, role_of, tau_of
from dlmi.report.estimates import (
    Estimate,
    by_target,
    differences,
    estimate,
    mean_over_targets,
    slope,
    unpaired,
)
from dlmi.report.loading import Budget, Series
from dlmi.report.names import Role
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

Findings = Iterator[Finding]


@claim("1a", "DLMI is best in all settings", needs="DLMI and another method")
def _dlmi_is_best(view: MetricView) -> Findings:
    for length, budget in view.settings():
        for found in view.gaps(view.find("DLMI", length), view.others(length), budget):
            yield above(*found)


@claim("1b", "DLMI is near-perfect (LCS > 0.9) at N=80 and 2048 steps", needs="DLMI at both")
def _dlmi_is_near_perfect(view: MetricView) -> Findings:
    for length, budget in view.settings():
        is_long = length >= LONG_PROMPT and budget.axis == "step" and budget.at >= LONG_RUN
        for found in view.means("DLMI", length, budget) if is_long else []:
            yield above(*found, NEAR_PERFECT, margin=0)


@claim("2", "REINFORCE is very poor (LCS < 0.2) everywhere", needs="free-running REINFORCE")
def _reinforce_is_poor(view: MetricView) -> Findings:
    for length, budget in view.settings():
        for found in view.means("REINFORCE", length, budget):
            yield below(*found, POOR)


@claim("3a", "GBDA is barely above REINFORCE (by -0.02 to 0.1)", needs="both, free-running")
def _gbda_barely_beats_reinforce(view: MetricView) -> Findings:
    for length, budget in view.settings():
        pair = view.find_all("GBDA", length), view.find("REINFORCE", length)
        for found in view.gaps(*pair, budget):
            yield between(*found, -NEGLIGIBLE, BARELY)


@claim("3b", "GBDA is below DLMI-TF", needs="GBDA and DLMI-TF")
def _gbda_is_below_dlmi(view: MetricView) -> Findings:
    for length, budget in view.settings():
        pair = view.find("DLMI-TF", length), view.find_all("GBDA", length)
        for found in view.gaps(*pair, budget):
            yield above(*found)


@claim("3c", "That gap grows with k", needs="GBDA and DLMI-TF at several k")
def _gbda_gap_grows(view: MetricView) -> Findings:
    for length, budget in view.settings():
        for dlmi in view.find("DLMI-TF", length):
            for gbda in view.find_all("GBDA", length):
                gaps = differences(dlmi.rows, gbda.rows, view.lcs(budget))
                if rise := slope(_against_k(dlmi, gaps)):
                    name = f"rise of {dlmi.label} - {gbda.label} from lowest to highest k"
                    yield above(f"{name} at {place(length, budget)}", rise)


@claim(
    "4",
    "Learned decoupled temperatures matter most (more than teacher forcing)",
    needs="DLMI, DLMI-TF of the same tau0, and GBDA",
)
def _temperature_matters_most(view: MetricView) -> Findings:
    for length, budget in view.settings():
        for forced, free in _forced_and_free(view, length):
            by_forcing = differences(forced.rows, free.rows, view.lcs(budget))
            for fixed in view.find_all("GBDA", length):
                by_temperature = differences(free.rows, fixed.rows, view.lcs(budget))
                if found := _mean_gain(by_forcing, by_temperature):
                    names = f"({free.label} - {fixed.label}) - ({forced.label} - {free.label})"
                    yield above(f"{names} at {place(length, budget)}", found)


@claim(
    "5",
    "Teacher forcing saves steps (DLMI above DLMI-TF at the smallest budget)",
    needs="DLMI and DLMI-TF of the same tau0",
)
def _forcing_saves_steps(view: MetricView) -> Findings:
    for length in view.lengths:
        for forced, free in _forced_and_free(view, length):
            for found in view.gaps([forced], [free], view.group.budgets[0]):
                yield above(*found)


@claim("6a", "Longer prompts are better for all methods", needs="two prompt lengths")
def _longer_prompts_are_better(view: MetricView) -> Findings:
    low, high = view.lengths[0], view.lengths[-1]
    for long in (series for series in view.series if series.prompt_length == high > low):
        for short in view.series:
            if (short.label, short.prompt_length) == (long.label, low):
                for budget in view.group.budgets:
                    for _, found in view.gaps([long], [short], budget):
                        yield above(f"{long.label}, N={high} - N={low}, {budget}", found)


@claim("6b", "At N=80 DLMI leads on hard targets", needs="DLMI and another method at N >= 80")
def _dlmi_leads_on_hard_targets(view: MetricView) -> Findings:
    difficulties = sorted({row.k for row in view.group.rows if row.k is not None})
    hard = difficulties[len(difficulties) // 2 :]  # the harder half

    def only_hard(series: Series) -> Series:
        return replace(series, rows=tuple(row for row in series.rows if row.k in hard))

    for length, budget in view.settings():
        dlmi = list(map(only_hard, view.find("DLMI", length)))
        others = list(map(only_hard, view.others(length)))
        for name, found in view.gaps(dlmi, others, budget) if length >= LONG_PROMPT else []:
            yield above(f"k >= {hard[0]}: {name}", found)


@claim("7", "SmolLM3-3B is easier to invert than SmolLM2-135M", needs="DLMI on both", kind="pair")
def _larger_is_easier(views: tuple[MetricView, MetricView]) -> Findings:
    small, large = views
    for length, budget in sorted(set(small.settings()) & set(large.settings())):
        measure = small.lcs(budget)
        for one in small.find("DLMI", length):
            for other in large.find("DLMI", length):
                # Each LM has its own targets, so this comparison is not paired.
                found = unpaired(by_target(other.rows, measure), by_target(one.rows, measure))
                if found:
                    yield above(f"{one.label} at {place(length, budget)}", found)


@claim("8a", "DLMI is robust in k (falls by less than 0.1)", needs="DLMI at several k")
def _dlmi_is_robust(view: MetricView) -> Findings:
    for fall in _falls(view, "DLMI"):
        yield above(*fall, -BARELY, margin=0)


@claim("8b", "SODA degrades in k", needs="SODA at several k")
def _soda_degrades(view: MetricView) -> Findings:
    for fall in _falls(view, "SODA"):
        yield below(*fall, 0.0, margin=NEGLIGIBLE)


@claim("8c", "SODA is flat after about 200 steps", needs="SODA with at least 400 steps")
def _soda_is_flat(view: MetricView) -> Findings:
    for length in view.lengths:
        for soda in view.find("SODA", length):
            early = by_target(soda.rows, view.lcs(Budget("step", SODA_FLAT_AFTER)))
            late = by_target(soda.rows, view.lcs(view.group.budgets[-1]))
            is_long = max(row.steps for row in soda.rows) >= 2 * SODA_FLAT_AFTER
            if is_long and (found := _mean_gain(early, late)):
                name = f"{soda.label}, N={length}, gain after {SODA_FLAT_AFTER} steps"
                yield below(name, found, NEGLIGIBLE)


@claim(
    "9",
    "Anytime: DLMI does not get worse from the smallest to the largest budget",
    metric="honest LCS of the moment, not the best so far",
    needs="DLMI or DLMI-TF at two budgets",
)
def _more_steps_do_no_harm(view: MetricView) -> Findings:
    first, last = view.group.budgets[0], view.group.budgets[-1]
    for series in _of_dlmi(view) if first != last else []:
        early, late = (by_target(series.rows, view.current_lcs(b)) for b in (first, last))
        if found := _mean_gain(early, late):
            name = f"{series.label}, N={series.prompt_length}, {last.at:.12g} - {first}"
            yield above(name, found, -NEGLIGIBLE, margin=0)


@claim("13", "DLMI(100)-TF is above DLMI(1)-TF at N=80", needs="both at N >= 80")
def _higher_tau_is_better(view: MetricView) -> Findings:
    for length, budget in view.settings():
        high, low = (view.find("DLMI-TF", length, tau) for tau in (100, 1))
        for found in view.gaps(high, low, budget) if length >= LONG_PROMPT else []:
            yield above(*found)


@claim(
    "14",
    "The mean temperature falls within 256 steps (a figure without a stated trend)",
    metric="log10 of tau at the end over the start",
    needs="DLMI or DLMI-TF with two evaluations",
    has_two_metrics=False,
)
def _temperature_falls(view: MetricView) -> Findings:
    def log_ratio(row: Inversion) -> float | None:
        known = [p for p in row.trace if p.step <= TEMPERATURE_STEPS]
        taus = [tau for p in known if (tau := p.means.get("tau", 0)) > 0]
        return math.log10(taus[-1] / taus[0]) if len(taus) > 1 else None

    for series in _of_dlmi(view):
        if found := mean_over_targets(series.rows, log_ratio):
            name = f"log10 of tau's change, {series.label}, N={series.prompt_length}"
            yield below(name, found, 0.0)


@claim(
    "15",
    "Prompts overlap with their targets by less than 20%, for all methods",
    metric="overlap ratio",
    needs="any method",
    has_two_metrics=False,
)
def _overlap_is_small(view: MetricView) -> Findings:
    for series in view.series:
        if found := mean_over_targets(series.rows, lambda row: row.overlap_ratio):
            yield below(f"{series.label}, N={series.prompt_length}", found, OVERLAP_BOUND)


@claim(
    "16",
    "Prompt perplexity is above the size of the vocabulary",
    metric="ln of perplexity; V from the largest token id seen",
    needs="prompts of two or more tokens",
    has_two_metrics=False,
)
def _perplexity_is_huge(view: MetricView) -> Findings:
    rows = view.group.rows
    largest = max(i for row in rows for i in (*row.prompt_ids, *row.target_ids, *row.output_ids))
    bound = math.log(largest + 1)
    for series in view.series:
        if found := mean_over_targets(series.rows, log_perplexity):
            name = f"ln perplexity, {series.label}, N={series.prompt_length}"
            yield above(f"{name} (ln V >= {bound:.3g})", found, bound, margin=0)


@claim(
    "17",
    "Learned prompts raise GSM8k accuracy by 9-35%",
    metric="accuracy",
    needs="another experiment than inversion",
    kind="nothing",
)
def _prompts_raise_accuracy(_view: None) -> Findings:
    yield from ()


def _of_dlmi(view: MetricView) -> list[Series]:
    return [series for series in view.series if role_of(series) in ("DLMI", "DLMI-TF")]


def _forced_and_free(view: MetricView, length: int) -> list[tuple[Series, Series]]:
    """DLMI and DLMI-TF of the same tau0."""
    return [
        (forced, free)
        for free in view.find("DLMI-TF", length)
        for forced in view.find("DLMI", length, tau_of(free))
    ]


def _mean_gain(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate | None:
    return estimate(after[target] - before[target] for target in before if target in after)


def _against_k(series: Series, values: Mapping[str, float]) -> Sequence[tuple[float, float]]:
    difficulties = {row.target_id: row.k for row in series.rows}
    return [(float(k), values[t]) for t, k in difficulties.items() if k is not None and t in values]


def _falls(view: MetricView, role: Role) -> Iterator[tuple[str, Estimate]]:
    """Change of LCS from the lowest to the highest k, along the least-squares line."""
    for length, budget in view.settings():
        for series in view.find(role, length):
            if fall := slope(_against_k(series, by_target(series.rows, view.lcs(budget)))):
                yield f"{series.label} from lowest to highest k at {place(length, budget)}", fall
