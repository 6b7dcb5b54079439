"""The checklist of the DLMI paper's claims, decided on these runs.

Claims about LCS are decided on the honest metric; what the as-in-code metric would say stands
beside it. Groups are decided apart, and so are runs whose prompts are restricted in other ways.
"""

from typing import Any

from dlmi.report.blocks import Cell, ReportTable

# Importing rules enters them into the list.
from dlmi.report.claims import gradient_rules, rules
from dlmi.report.claims.verdicts import (
    CLAIMS,
    CONFIDENCE,
    MIN_TARGETS,
    NEGLIGIBLE,
    Kind,
    Rule,
    claim,
    decide,
)
from dlmi.report.claims.views import MetricView, role_of
from dlmi.report.estimates import as_in_code_lcs, current_lcs, honest_lcs
from dlmi.report.loading import Group, ReportData, Series
from dlmi.report.names import natural_order, restrictions, settings_text

# What a claim is decided on: its name, and the rows through our metric and through the authors'.
Case = tuple[str, tuple[Any, Any]]

_CAPTION = (
    f"Decided by rules. Differences are paired by target and seed, averaged over seeds, with "
    f"Student's {CONFIDENCE:.0%} interval over targets in brackets. A claim holds if all its "
    f"intervals are where it wants them; it fails if one lies wholly where it cannot be, after "
    f"Bonferroni's correction (for differences that includes everything below {NEGLIGIBLE}); "
    f"otherwise, or with fewer than {MIN_TARGETS} targets, it is not decided. Verdicts are of "
    "these runs, LMs and targets, and of the method's settings in them; which of the paper's "
    "methods a run is follows from its settings, and of several DLMI the one with tau0 = 100 "
    "and the most rows counts. The paper's prompts may hold any token: runs that restrict them are "
    "decided apart, and say so. The last two columns apply the same rule to the LCS as in the "
    "authors' code (for gradients: to the largest variance and bias of a logit, as in the paper). "
    "Gradient statistics that the noise hides have no logarithm and do not count."
)


def claims_table(data: ReportData) -> ReportTable:
    """All claims with their verdicts, by number."""
    cases = claim_cases(data)
    ordered = sorted(CLAIMS, key=lambda entry: natural_order(entry[0].number))
    lines = [line for said, rule in ordered for line in _lines(said, rule, cases, data)]
    return ReportTable.of("claims", "The paper's claims", _CAPTION, lines)


def claim_cases(data: ReportData) -> dict[Kind, list[Case]]:
    """Everything that a rule may be asked about, by kind."""
    groups = [case for title, group in data.titled() for case in _group_cases(title, group)]
    pairs = [
        (f"{large} - {small}", ((ones[0], others[0]), (ones[1], others[1])))
        for small, ones in groups
        for large, others in groups
        if "smollm2-135m" in ones[0].group.model.lower()
        and "smollm3-3b" in others[0].group.model.lower()
    ]
    gradients = [(each.title, gradient_rules.gradient_views(each)) for each in data.gradients]
    return {"group": groups, "pair": pairs, "gradients": gradients, "nothing": []}


def _group_cases(title: str, group: Group) -> list[Case]:
    """The series of a group, by what their prompts are held to."""
    alike: dict[str, list[Series]] = {}
    for series in group.series:
        alike.setdefault(settings_text(restrictions(series.rows[0].settings)), []).append(series)
    return [
        (
            f"{title}, {held_to}" if held_to else title,
            (
                MetricView(group, members, honest_lcs, current_lcs),
                MetricView(group, members, as_in_code_lcs, as_in_code_lcs),
            ),
        )
        for held_to, members in sorted(alike.items())
    ]


def _lines(
    said: claim, rule: Rule, cases: dict[Kind, list[Case]], data: ReportData
) -> list[dict[str, Cell]]:
    """A line for each case that has something to say, or one that says what is missing."""
    outcomes: list[tuple[str | None, ...]] = []
    for on, (ours, theirs) in cases[said.kind]:
        verdict, evidence = decide(list(rule(ours)))
        other = decide(list(rule(theirs))) if said.has_two_metrics else (None, None)
        if verdict != "not tested":
            outcomes.append((on, verdict, evidence, *other))
    return [
        {
            "claim": said.number,
            "the paper says": said.text,
            "on": on,
            "verdict": verdict,
            "metric": said.metric,
            "what decided it": evidence,
            "as in the authors' code": other_verdict,
            "what decides that": other_evidence,
        }
        for on, verdict, evidence, other_verdict, other_evidence in outcomes
        or [(None, "not tested", _missing(said, data), None, None)]
    ]


def _missing(said: claim, data: ReportData) -> str:
    """What a claim needs, and which runs are not what they seem to be."""
    seeming = [
        series.label
        for group in data.groups
        for series in group.series
        if series.rows[0].method in said.needs and role_of(series) is None
    ]
    others = f"; {', '.join(dict.fromkeys(seeming))} is not as in the paper" if seeming else ""
    return f"needs {said.needs}{others}"


__all__ = ["claim_cases", "claims_table", "rules"]
