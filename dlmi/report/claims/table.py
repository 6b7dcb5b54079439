"""The checklist of the DLMI paper's claims, decided on these runs.

Claims about LCS are decided on the honest metric; what the as-in-code metric would say stands
beside it. Groups are decided apart, and so are runs whose prompts are restricted in other ways.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dlmi.report.blocks import ASSETS, Cell, ReportTable, block_texts
from dlmi.report.claims.rules import RULES, GradientView
from dlmi.report.claims.views import MetricView, held_to, role_of
from dlmi.report.estimates import MIN_TARGETS, Estimate, as_in_code_lcs, current_lcs, honest_lcs
from dlmi.report.loading import Group, ReportData

Kind = Literal["group", "pair", "gradients", "nothing"]
Verdict = Literal["holds", "fails", "not decided", "not tested"]
Finding = tuple[str, Estimate]  # named
# What a claim is decided on: its name, views through our metric, and those through the authors'.
Case = tuple[str, Sequence[Any], Sequence[Any]]


CONFIDENCE = 0.95
_SHOWN_FINDINGS = 2


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, as `assets/claims.toml` explains it."""

    text: str
    needs: str
    metric: str = "honest LCS"
    kind: Kind = "group"
    low: float = -math.inf
    high: float = math.inf
    margin: float = 0.0
    at: int | None = None
    prompt_length: int = 0
    has_two_metrics: bool = True

    def decide(self, findings: Sequence[Finding]) -> tuple[Verdict, str]:
        """The verdict, and the numbers that decided it.

        It holds if every finding does and fails if one refutes it; else it is not decided. That
        all hold needs no correction for their number; that one fails does (Bonferroni).
        """
        if not findings:
            return "not tested", "no runs to compare"
        held = [finding for finding in findings if self._distance(finding) < 0]
        refuting = [finding for finding in findings if self._is_refuted(finding, len(findings))]
        verdict: Verdict = "fails" if refuting else "not decided"
        shown = refuting or [finding for finding in findings if finding not in held]
        if len(held) == len(findings):
            verdict, shown = "holds", held
        counts = [f"{len(held)} of {len(findings)} hold"] if len(findings) > 1 else []
        counts += [f"{len(refuting)} fail"] if refuting else []
        worst = sorted(shown, key=self._distance, reverse=True)[:_SHOWN_FINDINGS]
        return verdict, "; ".join([", ".join(counts)] * bool(counts) + [*map(_evidence, worst)])

    def _distance(self, finding: Finding) -> float:
        """How far it is from safely where the claim wants it: the larger, the worse."""
        low, high = finding[1].interval(CONFIDENCE)
        return max(self.low - low, high - self.high) if math.isfinite(low) else math.inf

    def _is_refuted(self, finding: Finding, comparisons: int) -> bool:
        low, high = finding[1].interval(1 - (1 - CONFIDENCE) / comparisons)
        return high < self.low + self.margin or low > self.high - self.margin


CLAIMS = msgspec.toml.decode((ASSETS / "claims.toml").read_bytes(), type=dict[str, Claim])


def _evidence(finding: Finding) -> str:
    what, found = finding
    low, high = found.interval(CONFIDENCE)
    interval = f" [{low:.3f}, {high:.3f}]" if math.isfinite(low) else " (no interval)"
    return f"{what}: {found.mean:.3f}{interval}, {found.targets} targets"


def claims_table(data: ReportData) -> ReportTable:
    """All claims with their verdicts, by number."""
    columns = ["claim", "the paper says", "on", "verdict", "metric", "what decided it"]
    columns += ["as in the authors' code", "what decides that"]
    cases = claim_cases(data)
    rows = (row for number in CLAIMS for row in _rows(number, cases, data))
    texts = block_texts("claims", confidence=CONFIDENCE, targets=MIN_TARGETS)
    return ReportTable(*texts, tuple(columns), tuple(rows))


def claim_cases(data: ReportData) -> dict[Kind, list[Case]]:
    """Everything that a rule may be asked about, by kind."""
    groups = [case for group in data.groups for case in _group_cases(group)]
    small, large = (
        [case for case in groups if name in case[1][0].group.model.lower()]
        for name in ("smollm2-135m", "smollm3-3b")
    )
    pairs = [_pair(*both) for both in itertools.product(small, large)]
    gradients: list[Case] = [
        (each.title, [GradientView(each)], [GradientView(each, "variance_max", "bias_max")])
        for each in data.gradients
    ]
    return {"group": groups, "pair": pairs, "gradients": gradients, "nothing": []}


def _group_cases(group: Group) -> Iterator[Case]:
    """The series of a group, by what their prompts are held to."""
    settings = list(itertools.product(group.prompt_lengths, group.budgets))
    for held, found in itertools.groupby(sorted(group.series, key=held_to), held_to):
        members = list(found)
        ours, theirs = (
            [MetricView(group, members, *setting, *metrics) for setting in settings]
            for metrics in ((honest_lcs, current_lcs), (as_in_code_lcs, as_in_code_lcs))
        )
        yield f"{group.title}, {held}" if held else group.title, ours, theirs


def _pair(small: Case, large: Case) -> Case:
    """The views of two LMs at the same N and budget."""
    ours, theirs = (
        [pair for pair in itertools.product(*views) if pair[0].place == pair[1].place]
        for views in zip(small[1:], large[1:], strict=True)
    )
    return f"{large[0]} - {small[0]}", ours, theirs


def decide_on(number: str, views: Sequence[Any]) -> tuple[Verdict, str]:
    """What a claim's rule finds in all views that the claim is about."""
    said = CLAIMS[number]
    if said.at is not None:
        views = [view for view in views if view.budget == view.group.budgets[said.at]]
    if said.prompt_length:
        views = [view for view in views if view.length >= said.prompt_length]
    return said.decide([finding for view in views for finding in RULES[number](view)])


def _rows(
    number: str, cases: dict[Kind, list[Case]], data: ReportData
) -> Iterator[tuple[Cell, ...]]:
    """A row for each case that has something to say, or one that says what is missing."""
    said = CLAIMS[number]
    tested: list[tuple[Cell, ...]] = []
    for name, ours, theirs in cases[said.kind]:
        verdict, evidence = decide_on(number, ours)
        others = decide_on(number, theirs) if said.has_two_metrics else (None, None)
        if verdict != "not tested":
            tested.append((name, verdict, said.metric, evidence, *others))
    missing = (None, "not tested", said.metric, _missing(said, data), None, None)
    return ((number, said.text, *outcome) for outcome in tested or [missing])


def _missing(said: Claim, data: ReportData) -> str:
    """What a claim needs, and which runs are not what they seem to be."""
    everyone = [series for _, series in data.each()]
    seeming = {s.label for s in everyone if s.rows[0].method in said.needs and role_of(s) is None}
    where = " on the same LM and targets" if len(data.groups) > 1 and said.kind == "group" else ""
    alike = " with prompts restricted alike" if len(set(map(held_to, everyone))) > 1 else ""
    others = f"; not as in the paper: {', '.join(sorted(seeming))}" if seeming else ""
    return f"needs {said.needs}{where}{alike}{others}"
