"""The paper's claims about LCS and prompts, each as a rule that gives its findings in a scene."""

import math
from collections.abc import Iterator, Sequence

from dlmi.report.estimates import (
    Estimate,
    by_target,
    differences,
    estimate,
    mean_over_targets,
    slope,
)
from dlmi.report.loading import Series
from dlmi.report.method_names import Role
from dlmi.report.naming import budget_name
from dlmi.report.prompt_tables import log_perplexity
from dlmi.report.scene import Scene, place, role_of, tau_of
from dlmi.report.verdicts import NEGLIGIBLE, Finding, above, below, between
from dlmi.rows import Inversion

LONG_PROMPT = 80
LONG_RUN = 2048
POOR = 0.2  # "below ~20%"
NEAR_PERFECT = 0.9
BARELY = 0.1
SODA_FLAT_AFTER = 200
OVERLAP_BOUND = 0.2
TEMPERATURE_STEPS = 256


def dlmi_is_best(scene: Scene) -> Iterator[Finding]:
    """1a: above every method that is not a kind of DLMI."""
    for length, budget in scene.settings():
        dlmi = scene.find("DLMI", length)
        for other in scene.group.series:
            if other.prompt_length == length and other.rows[0].method != "DLMI":
                yield from _above(scene.difference(dlmi, other, budget))


def dlmi_is_near_perfect(scene: Scene) -> Iterator[Finding]:
    """1b: mean LCS with long prompts and the long budget."""
    for length, budget in scene.settings():
        dlmi = scene.find("DLMI", length)
        if dlmi is None or length < LONG_PROMPT or budget[0] != "step" or budget[1] < LONG_RUN:
            continue
        if found := mean_over_targets(dlmi.rows, scene.lcs(*budget)):
            yield above(f"{dlmi.label} at {place(length, budget)}", found, NEAR_PERFECT, margin=0)


def reinforce_is_poor(scene: Scene) -> Iterator[Finding]:
    """2: mean LCS below 0.2 everywhere."""
    for length, budget in scene.settings():
        series = scene.find("REINFORCE", length)
        if series and (found := mean_over_targets(series.rows, scene.lcs(*budget))):
            yield below(f"{series.label} at {place(length, budget)}", found, POOR)


def gbda_barely_beats_reinforce(scene: Scene) -> Iterator[Finding]:
    """3a: about as good or above it, by less than 0.1."""
    for length, budget in scene.settings():
        reinforce = scene.find("REINFORCE", length)
        for gbda in scene.find_all("GBDA", length):
            if found := scene.difference(gbda, reinforce, budget):
                yield between(*found, -NEGLIGIBLE, BARELY)


def gbda_is_below_dlmi(scene: Scene) -> Iterator[Finding]:
    """3b: DLMI-TF above GBDA."""
    for length, budget in scene.settings():
        dlmi = scene.find("DLMI-TF", length)
        for gbda in scene.find_all("GBDA", length):
            yield from _above(scene.difference(dlmi, gbda, budget))


def gbda_gap_grows(scene: Scene) -> Iterator[Finding]:
    """3c: the same difference rises with k."""
    for length, budget in scene.settings():
        dlmi = scene.find("DLMI-TF", length)
        if dlmi is None:
            continue
        for gbda in scene.find_all("GBDA", length):
            gaps = differences(dlmi.rows, gbda.rows, scene.lcs(*budget))
            if rise := slope(_against_k(dlmi, gaps)):
                name = f"rise of {dlmi.label} - {gbda.label} from lowest to highest k"
                yield above(f"{name} at {place(length, budget)}", rise)


def temperature_matters_most(scene: Scene) -> Iterator[Finding]:
    """4: learned temperatures bring more than teacher forcing does."""
    for length, budget in scene.settings():
        free = scene.find("DLMI-TF", length)
        forced = free and scene.find("DLMI", length, tau_of(free))
        if free is None or forced is None:
            continue
        measure = scene.lcs(*budget)
        by_forcing = differences(forced.rows, free.rows, measure)
        for fixed in scene.find_all("GBDA", length):
            by_temperature = differences(free.rows, fixed.rows, measure)
            shared = by_temperature.keys() & by_forcing.keys()
            if found := estimate(by_temperature[t] - by_forcing[t] for t in shared):
                names = f"({free.label} - {fixed.label}) - ({forced.label} - {free.label})"
                yield above(f"{names} at {place(length, budget)}", found)


def forcing_saves_steps(scene: Scene) -> Iterator[Finding]:
    """5: DLMI above DLMI-TF at the smallest budget."""
    budget = scene.budgets()[0]
    for length in scene.group.prompt_lengths:
        free = scene.find("DLMI-TF", length)
        forced = free and scene.find("DLMI", length, tau_of(free))
        yield from _above(scene.difference(forced, free, budget))


def longer_prompts_are_better(scene: Scene) -> Iterator[Finding]:
    """6a: the longest N above the shortest, for every method."""
    lengths = scene.group.prompt_lengths
    for long in scene.group.series:
        for short in scene.group.series:
            same = long.label == short.label
            if same and (long.prompt_length, short.prompt_length) == (lengths[-1], lengths[0]):
                for budget in scene.budgets():
                    if found := scene.difference(long, short, budget):
                        name = f"{long.label}, N={lengths[-1]} - N={lengths[0]}"
                        yield above(f"{name}, {budget_name(*budget)}", found[1])


def dlmi_leads_on_hard_targets(scene: Scene) -> Iterator[Finding]:
    """6b: at N >= 80, DLMI above every other method on the harder half of the difficulties."""
    difficulties = sorted({row.k for row in scene.group.rows if row.k is not None})
    hard = set(difficulties[len(difficulties) // 2 :])
    for length, budget in scene.settings():
        dlmi = scene.find("DLMI", length)
        if dlmi is None or length < LONG_PROMPT:
            continue
        for other in scene.group.series:
            if other.prompt_length == length and other.rows[0].method != "DLMI":
                found = scene.difference(_only(dlmi, hard), _only(other, hard), budget)
                if found is not None:
                    yield above(f"k >= {min(hard)}: {found[0]}", found[1])


def dlmi_is_robust(scene: Scene) -> Iterator[Finding]:
    """8a: DLMI falls by less than 0.1 from the lowest to the highest k."""
    for what, fall in _falls(scene, "DLMI"):
        yield above(what, fall, -BARELY, margin=0)


def soda_degrades(scene: Scene) -> Iterator[Finding]:
    """8b: SODA falls with k."""
    for what, fall in _falls(scene, "SODA"):
        yield below(what, fall, 0.0, margin=NEGLIGIBLE)


def soda_is_flat(scene: Scene) -> Iterator[Finding]:
    """8c: SODA gains nothing after 200 steps."""
    for length in scene.group.prompt_lengths:
        soda = scene.find("SODA", length)
        if soda is None or max(row.settings.get("steps", 0) for row in soda.rows) < 400:
            continue
        early, late = (by_target(soda.rows, scene.lcs("step", at)) for at in (SODA_FLAT_AFTER, 1e9))
        if found := estimate(late[t] - early[t] for t in early.keys() & late.keys()):
            name = f"{soda.label}, N={length}, gain after {SODA_FLAT_AFTER} steps"
            yield below(name, found, NEGLIGIBLE)


def more_steps_do_no_harm(scene: Scene) -> Iterator[Finding]:
    """9: from the smallest to the largest budget, the prompt of the moment does not get worse."""
    first, *_, last = scene.budgets() if len(scene.budgets()) > 1 else [None, None]
    for series in scene.group.series:
        if first is None or last is None or role_of(series) not in ("DLMI", "DLMI-TF"):
            continue
        early, late = (by_target(series.rows, scene.current_lcs(*b)) for b in (first, last))
        if found := estimate(late[t] - early[t] for t in early.keys() & late.keys()):
            name = f"{series.label}, N={series.prompt_length}, {last[1]:g} - {budget_name(*first)}"
            yield above(name, found, -NEGLIGIBLE, margin=0)


def higher_tau_is_better(scene: Scene) -> Iterator[Finding]:
    """13: DLMI(100)-TF above DLMI(1)-TF at N >= 80."""
    for length, budget in scene.settings():
        if length >= LONG_PROMPT:
            pair = scene.find("DLMI-TF", length, 100), scene.find("DLMI-TF", length, 1)
            yield from _above(scene.difference(*pair, budget))


def temperature_falls(scene: Scene) -> Iterator[Finding]:
    """14: the mean temperature is lower after 256 steps than at the start."""

    def log_ratio(row: Inversion) -> float | None:
        taus = [
            point.means["tau"]
            for point in row.trace
            if point.means.get("tau", 0) > 0 and point.step <= TEMPERATURE_STEPS
        ]
        return math.log10(taus[-1] / taus[0]) if len(taus) > 1 else None

    for series in scene.group.series:
        found = mean_over_targets(series.rows, log_ratio)
        if found is not None and role_of(series) in ("DLMI", "DLMI-TF"):
            name = f"log10 of tau's change, {series.label}, N={series.prompt_length}"
            yield below(name, found, 0.0)


def overlap_is_small(scene: Scene) -> Iterator[Finding]:
    """15: mean overlap below 0.2, for every method."""
    for series in scene.group.series:
        if found := mean_over_targets(series.rows, lambda row: row.overlap_ratio):
            yield below(f"{series.label}, N={series.prompt_length}", found, OVERLAP_BOUND)


def perplexity_is_huge(scene: Scene) -> Iterator[Finding]:
    """16: geometric mean perplexity above the size of the vocabulary, for every method."""
    rows = scene.group.rows
    largest = max(i for row in rows for i in (*row.prompt_ids, *row.target_ids, *row.output_ids))
    for series in scene.group.series:
        if found := mean_over_targets(series.rows, log_perplexity):
            name = f"ln perplexity, {series.label}, N={series.prompt_length}"
            bound = math.log(largest + 1)
            yield above(f"{name} (ln V >= {bound:.3g})", found, bound, margin=0)


def _above(difference: tuple[str, Estimate] | None) -> list[Finding]:
    return [] if difference is None else [above(*difference)]


def _only(series: Series, difficulties: set[int]) -> Series | None:
    rows = tuple(row for row in series.rows if row.k in difficulties)
    return Series(series.label, series.prompt_length, rows) if rows else None


def _against_k(series: Series, values: dict[str, float]) -> Sequence[tuple[float, float]]:
    difficulties = {row.target_id: row.k for row in series.rows}
    return [(float(k), values[t]) for t, k in difficulties.items() if k is not None and t in values]


def _falls(scene: Scene, role: Role) -> Iterator[tuple[str, Estimate]]:
    """Change of LCS from the lowest to the highest k, along the least-squares line."""
    for length, budget in scene.settings():
        series = scene.find(role, length)
        if series is None:
            continue
        values = by_target(series.rows, scene.lcs(*budget))
        if fall := slope(_against_k(series, values)):
            yield f"{series.label} from lowest to highest k at {place(length, budget)}", fall
