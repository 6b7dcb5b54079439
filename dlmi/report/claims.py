"""The checklist of the DLMI paper's claims, decided on these runs.

Every verdict comes from a rule in code. Claims about LCS are decided on the honest metric; what the
as-in-code metric would say stands beside it. Groups are decided apart.
"""

from collections.abc import Iterator, Sequence

from dlmi.report.checklist import CLAIMS, Claim
from dlmi.report.estimates import by_target, unpaired
from dlmi.report.gradient_claims import GRADIENT_CLAIMS
from dlmi.report.gradient_sets import GradientSet
from dlmi.report.loading import Group, Loaded
from dlmi.report.naming import budget_name, group_titles
from dlmi.report.parts import Cell, ReportTable
from dlmi.report.scene import Scene, as_in_code_scene, honest_scene
from dlmi.report.verdicts import (
    CONFIDENCE,
    MIN_TARGETS,
    NEGLIGIBLE,
    Finding,
    above,
    decide,
)


def claims_table(loaded: Loaded, gradients: Sequence[GradientSet]) -> ReportTable:
    """All claims with their verdicts, by number."""
    rows: list[tuple[Cell, ...]] = []
    titled = list(zip(group_titles(loaded.groups), loaded.groups, strict=True))
    for claim in CLAIMS:
        tested = [cells for name, group in titled if (cells := _decide_group(claim, name, group))]
        rows += tested or [_not_tested(claim.number, claim.statement, claim.metric, claim.needs)]
    rows += _larger_is_easier(titled)
    for gradient_claim in GRADIENT_CLAIMS:
        place = (gradient_claim.number, gradient_claim.statement)
        metric = gradient_claim.metric
        decided = [
            (*place, found.title, own.verdict, metric, own.evidence, paper.verdict, paper.evidence)
            for found in gradients
            for own, paper in [gradient_claim.decide(found)]
            if "not tested" not in (own.verdict, paper.verdict)
        ]
        rows += decided or [_not_tested(*place, metric, gradient_claim.needs)]
    statement = "Learned prompts raise GSM8k accuracy by 9-35%"
    rows.append(_not_tested("17", statement, "accuracy", "another experiment than inversion"))
    rows.sort(key=lambda row: (int(str(row[0]).rstrip("abc")), str(row[0])))
    columns = (
        *("claim", "the paper says", "on", "verdict", "metric", "what decided it"),
        *("as in the authors' code", "what decides that"),
    )
    caption = (
        f"Decided by rules. Differences are paired by target and seed, averaged over seeds, with "
        f"Student's {CONFIDENCE:.0%} interval over targets in brackets. A claim holds if all its "
        f"intervals are where it wants them; it fails if one lies wholly where it cannot be, after "
        f"Bonferroni's correction (for differences that includes everything below {NEGLIGIBLE}); "
        f"otherwise, or with fewer than {MIN_TARGETS} targets, it is not decided. Verdicts are of "
        "these runs, LMs and targets, and of the method's settings in them; which of the paper's "
        "methods a run is follows from its settings, and of several DLMI the one with tau0 = 100 "
        "and the most rows counts. The last two columns "
        "apply the same rule to the LCS as in the authors' code (for gradients: to the largest "
        "variance and bias of a logit, as in the paper). Gradient statistics that the noise hides "
        "have no logarithm and do not count."
    )
    return ReportTable("claims", "The paper's claims", caption, columns, tuple(rows))


def _decide_group(claim: Claim, name: str, group: Group) -> tuple[Cell, ...] | None:
    """A line of the table; None if the group has nothing to say."""
    outcome = decide(list(claim.rule(honest_scene(group))))
    if outcome.verdict == "not tested":
        return None
    line = (claim.number, claim.statement, name, outcome.verdict, claim.metric, outcome.evidence)
    if not claim.has_two_metrics:
        return (*line, None, None)
    other = decide(list(claim.rule(as_in_code_scene(group))))
    return (*line, other.verdict, other.evidence)


def _not_tested(number: str, statement: str, metric: str, needs: str) -> tuple[Cell, ...]:
    return (number, statement, None, "not tested", metric, f"needs {needs}", None, None)


def _larger_is_easier(titled: Sequence[tuple[str, Group]]) -> list[tuple[Cell, ...]]:
    """7: each model has its own targets, so this comparison is not paired."""
    metric = "honest LCS"
    place = ("7", "SmolLM3-3B is easier to invert than SmolLM2-135M")
    small = [(name, group) for name, group in titled if "smollm2-135m" in group.model.lower()]
    large = [(name, group) for name, group in titled if "smollm3-3b" in group.model.lower()]
    rows: list[tuple[Cell, ...]] = []
    for small_name, one in small:
        for large_name, other in large:
            outcomes = [
                decide(list(_model_differences(make(one), make(other))))
                for make in (honest_scene, as_in_code_scene)
            ]
            if outcomes[0].verdict != "not tested":
                on = f"{large_name} - {small_name}"
                cells = [cell for o in outcomes for cell in (o.verdict, o.evidence)]
                rows.append((*place, on, cells[0], metric, *cells[1:]))
    return rows or [_not_tested(*place, metric, "runs of both LMs")]


def _model_differences(small: Scene, large: Scene) -> Iterator[Finding]:
    places = set(large.settings())
    for length, budget in small.settings():
        one, other = small.find("DLMI", length), large.find("DLMI", length)
        if one is None or other is None or (length, budget) not in places:
            continue
        measure = small.lcs(*budget)
        found = unpaired(by_target(other.rows, measure), by_target(one.rows, measure))
        if found:
            yield above(f"{one.label} at N={length}, {budget_name(*budget)}", found)
