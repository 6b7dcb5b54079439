"""The checklist of the DLMI paper's claims, decided on these runs.

Claims about LCS are decided on the honest metric, and next to it on the as-in-code metric. Every
group is a case of its own, and so are runs whose prompts are restricted in other ways.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
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
# What a claim is decided on: a name, views through our metric, and views through the authors'.
Case = tuple[str, Sequence[Any], Sequence[Any]]

CONFIDENCE = 0.95
_SHOWN_FINDINGS = 2


@dataclass(frozen=True)
class Claim:
    """A claim of the paper; `assets/claims.toml` explains the fields."""

    text: str
    needs: str
    metric: str = "honest LCS"
    kind: Kind = "group"
    low: float = -math.inf
    high: float = math.inf
    margin: float = 0.0
    at: int | None = None
    prompt_length: int = 0
    is_paired: bool = False
    has_two_metrics: bool = True

    def decide(self, findings: Sequence[Finding]) -> tuple[Verdict, str]:
        """The verdict, and the numbers that decided it.

        A claim holds if every finding does, fails if one refutes it, and is not decided otherwise.
        Bonferroni's correction is for the latter test; that all hold needs none.
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
        """How far the interval reaches out of the claim's bounds; negative if it is within."""
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
    targets = f"{found.targets} target{'' if found.targets == 1 else 's'}"
    return f"{what}: {found.mean:.3f}{interval}, {targets}"


def claims_table(data: ReportData) -> ReportTable:
    """All claims with their verdicts: a row per case with findings, otherwise what is missing."""
    cases = claim_cases(data)
    rows: list[tuple[Cell, ...]] = []
    for number, said in CLAIMS.items():
        outcomes: list[tuple[Cell, ...]] = []
        for name, ours, theirs in cases[said.kind]:
            verdict, evidence = decide_on(number, ours)
            others = decide_on(number, theirs) if said.has_two_metrics else (None, None)
            if verdict != "not tested":
                outcomes.append((name, verdict, said.metric, evidence, *others))
        missing = (None, "not tested", said.metric, _missing(said, data), None, None)
        rows += [(number, said.text, *outcome) for outcome in outcomes or [missing]]
    columns = ["claim", "the paper says", "on", "verdict", "metric", "what decided it"]
    columns += ["as in the authors' code", "what decides that"]
    texts = block_texts("claims", confidence=CONFIDENCE, targets=MIN_TARGETS)
    return ReportTable(*texts, tuple(columns), tuple(rows))


def claim_cases(data: ReportData) -> dict[Kind, list[Case]]:
    """Everything that a rule may be asked about, by kind."""
    groups = [case for group in data.groups for case in _group_cases(group)]
    small, large = (
        [case for case in groups if name in case[1][0].group.model.lower()]
        for name in ("smollm2-135m", "smollm3-3b")
    )
    gradients: list[Case] = [
        (each.title, [GradientView(each)], [GradientView(each, "variance_max", "bias_max")])
        for each in data.gradients
    ]
    pairs = [_pair(*both) for both in product(small, large)]
    return {"group": groups, "pair": pairs, "gradients": gradients, "nothing": []}


def _group_cases(group: Group) -> Iterator[Case]:
    """The series of a group, by the restrictions of their prompts."""
    settings = list(product(group.prompt_lengths, group.budgets))
    for held, found in groupby(sorted(group.series, key=held_to), held_to):
        members = list(found)
        ours, theirs = (
            [MetricView(group, members, *setting, *metrics) for setting in settings]
            for metrics in ((honest_lcs, current_lcs), (as_in_code_lcs, as_in_code_lcs))
        )
        yield f"{group.title}, {held}" if held else group.title, ours, theirs


def _pair(small: Case, large: Case) -> Case:
    """The views of two LMs at the same N and budget."""
    ours, theirs = (
        [pair for pair in product(*views) if pair[0].place == pair[1].place]
        for views in zip(small[1:], large[1:], strict=True)
    )
    return f"{large[0]} - {small[0]}", ours, theirs


def decide_on(number: str, views: Sequence[Any]) -> tuple[Verdict, str]:
    """The verdict of a claim on all views that it is about."""
    said = CLAIMS[number]
    if said.at is not None:
        views = [view for view in views if view.budget == view.group.budgets[said.at]]
    if said.prompt_length:
        views = [view for view in views if view.length >= said.prompt_length]
    return said.decide([finding for view in views for finding in RULES[number](view)])


def _missing(said: Claim, data: ReportData) -> str:
    """What a claim needs: runs, what they must share, and which runs differ from the paper's."""
    every = list(data.each())
    shared: dict[str, set[Any]] = {
        "LM": {(group.fingerprint, group.dtype) for group, _ in every},
        "targets": {frozenset((r.target_set, r.target_id) for r in s.rows) for _, s in every},
        "N": {series.prompt_length for _, series in every},
        "seeds": {frozenset(row.seed for row in series.rows) for _, series in every},
        "restrictions of the prompt": {held_to(series) for _, series in every},
    }
    names = [name for name, values in shared.items() if len(values) > 1 and said.is_paired]
    alike = f" (with the same {', '.join(names)})" if names else ""
    seeming = {s.label for _, s in every if s.rows[0].method in said.needs and role_of(s) is None}
    others = f"; not as in the paper: {', '.join(sorted(seeming))}" if seeming else ""
    return f"needs {said.needs}{alike}{others}"
