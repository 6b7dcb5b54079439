"""The checklist of the DLMI paper's claims, decided on these runs.

Claims about LCS are decided on the honest metric; what the as-in-code metric would say stands
beside it. Groups are decided apart, and so are runs whose prompts are restricted in other ways.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dlmi.report.blocks import ASSETS, Cell, ReportTable
from dlmi.report.claims import gradient_rules, rules  # noqa: F401, importing enters them
from dlmi.report.claims.verdicts import CONFIDENCE, MIN_TARGETS, NEGLIGIBLE, RULES, Verdict, decide
from dlmi.report.claims.views import MetricView, role_of
from dlmi.report.estimates import as_in_code_lcs, current_lcs, honest_lcs
from dlmi.report.loading import Group, ReportData, Series
from dlmi.report.names import restrictions, settings_text

Kind = Literal["group", "pair", "gradients", "nothing"]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, as `assets/claims.toml` explains it."""

    text: str
    needs: str
    metric: str = "honest LCS"
    kind: Kind = "group"
    at: int | None = None
    has_two_metrics: bool = True


CLAIMS = msgspec.toml.decode((ASSETS / "claims.toml").read_bytes(), type=dict[str, Claim])

# What a claim is decided on: its name, views through our metric, and those through the authors'.
Case = tuple[str, Sequence[Any], Sequence[Any]]


def claims_table(data: ReportData) -> ReportTable:
    """All claims with their verdicts, by number."""
    cases = claim_cases(data)
    return ReportTable.of(
        "claims",
        [
            line
            for number, said in CLAIMS.items()
            for line in _lines(number, cases[said.kind], data)
        ],
        confidence=CONFIDENCE,
        negligible=NEGLIGIBLE,
        targets=MIN_TARGETS,
    )


def claim_cases(data: ReportData) -> dict[Kind, list[Case]]:
    """Everything that a rule may be asked about, by kind."""
    groups = [case for title, group in data.titled() for case in _group_cases(title, group)]
    pairs: list[Case] = [
        (f"{b[0]} - {a[0]}", _same_settings(a[1], b[1]), _same_settings(a[2], b[2]))
        for a, b in itertools.permutations(groups, 2)
        if "smollm2-135m" in a[1][0].group.model.lower()
        and "smollm3-3b" in b[1][0].group.model.lower()
    ]
    gradients: list[Case] = [
        (each.title, *gradient_rules.gradient_views(each)) for each in data.gradients
    ]
    return {"group": groups, "pair": pairs, "gradients": gradients, "nothing": []}


def _group_cases(title: str, group: Group) -> list[Case]:
    """The series of a group, by what their prompts are held to."""
    alike: dict[str, list[Series]] = {}
    for series in group.series:
        alike.setdefault(settings_text(restrictions(series.rows[0].settings)), []).append(series)
    cases: list[Case] = []
    for held_to, members in sorted(alike.items()):
        settings = list(itertools.product(group.prompt_lengths, group.budgets))
        ours, theirs = (
            [MetricView(group, members, *setting, *metrics) for setting in settings]
            for metrics in ((honest_lcs, current_lcs), (as_in_code_lcs, as_in_code_lcs))
        )
        cases.append((f"{title}, {held_to}" if held_to else title, ours, theirs))
    return cases


def _same_settings(
    ones: Iterable[MetricView], others: Iterable[MetricView]
) -> list[tuple[MetricView, MetricView]]:
    """The views of two LMs at the same N and budget."""
    return [pair for pair in itertools.product(ones, others) if pair[0].place == pair[1].place]


def decide_on(number: str, views: Sequence[Any]) -> tuple[Verdict, str]:
    """What a claim's rule finds in all views that the claim is about."""
    if (at := CLAIMS[number].at) is not None:
        views = [view for view in views if view.budget == view.group.budgets[at]]
    return decide([finding for view in views for finding in RULES[number](view)])


def _lines(number: str, cases: Sequence[Case], data: ReportData) -> Iterator[dict[str, Cell]]:
    """A line for each case that has something to say, or one that says what is missing."""
    said = CLAIMS[number]
    missing = (None, "not tested", _missing(said, data), None, None)
    outcomes: list[tuple[str | None, ...]] = []
    for case, ours, theirs in cases:
        verdict_and_evidence = decide_on(number, ours)
        others = decide_on(number, theirs) if said.has_two_metrics else (None, None)
        if verdict_and_evidence[0] != "not tested":
            outcomes.append((case, *verdict_and_evidence, *others))
    for on, verdict, evidence, other_verdict, other_evidence in outcomes or [missing]:
        yield {
            "claim": number,
            "the paper says": said.text,
            "on": on,
            "verdict": verdict,
            "metric": said.metric,
            "what decided it": evidence,
            "as in the authors' code": other_verdict,
            "what decides that": other_evidence,
        }


def _missing(said: Claim, data: ReportData) -> str:
    """What a claim needs, and which runs are not what they seem to be."""
    everyone = [series for group in data.groups for series in group.series]
    seeming = {s.label for s in everyone if s.rows[0].method in said.needs and role_of(s) is None}
    held_to = {settings_text(restrictions(series.rows[0].settings)) for series in everyone}
    where = " on the same LM and targets" if len(data.groups) > 1 and said.kind == "group" else ""
    alike = " with prompts restricted alike" if len(held_to) > 1 else ""
    others = f"; not as in the paper: {', '.join(sorted(seeming))}" if seeming else ""
    return f"needs {said.needs}{where}{alike}{others}"
