"""How a claim is decided from a number of findings, each an estimate with its interval."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dlmi.report.estimates import Estimate

Verdict = Literal["holds", "fails", "not decided", "not tested"]

CONFIDENCE = 0.95
MIN_TARGETS = 3
NEGLIGIBLE = 0.02  # of LCS: a difference below it is none

_SHOWN_FINDINGS = 2


@dataclass(frozen=True)
class Finding:
    """One estimate that a claim says something about."""

    what: str
    estimate: Estimate
    wanted: tuple[float, float]  # the claim puts it between these two
    refuted: tuple[float, float]  # below the first or above the second it refutes the claim

    @property
    def is_known(self) -> bool:
        """Whether there are enough targets for an interval."""
        return self.estimate.error is not None and self.estimate.targets >= MIN_TARGETS

    def holds(self) -> bool:
        """Whether the whole interval is where the claim wants it."""
        return self.is_known and self.distance() < 0

    def fails(self, comparisons: int) -> bool:
        """Whether the whole interval refutes it, the error shared out among so many findings."""
        low, high = self.estimate.interval(1 - (1 - CONFIDENCE) / comparisons)
        return self.is_known and (high < self.refuted[0] or low > self.refuted[1])

    def distance(self) -> float:
        """How far the claim is from safe here: the larger, the worse."""
        low, high = self.estimate.interval(CONFIDENCE)
        return max(self.wanted[0] - low, high - self.wanted[1])

    def __str__(self) -> str:
        low, high = self.estimate.interval(CONFIDENCE)
        interval = f" [{low:.3f}, {high:.3f}]" if math.isfinite(low) else " (no interval)"
        return f"{self.what}: {self.estimate.mean:.3f}{interval}, {self.estimate.targets} targets"


Findings = Iterable[Finding]
Rule = Callable[[Any], Findings]  # what a view holds that a claim says something about
RULES: dict[str, Rule] = {}


def above(what: str, estimate: Estimate, bound: float = 0.0, margin: float = NEGLIGIBLE) -> Finding:
    """A claim that something lies above a bound; refuted where it clearly does not by a margin."""
    return Finding(what, estimate, (bound, math.inf), (bound + margin, math.inf))


def below(what: str, estimate: Estimate, bound: float, margin: float = 0.0) -> Finding:
    """A claim that something lies below a bound."""
    return Finding(what, estimate, (-math.inf, bound), (-math.inf, bound - margin))


def between(what: str, estimate: Estimate, low: float, high: float) -> Finding:
    """A claim that something lies within a range."""
    return Finding(what, estimate, (low, high), (low, high))


def decide(findings: Sequence[Finding]) -> tuple[Verdict, str]:
    """The verdict, and the numbers that decided it.

    A claim holds if every finding does and fails if one refutes it; else it is not decided. That
    all hold needs no correction for their number; that one fails does (Bonferroni).
    """
    if not findings:
        return "not tested", "no runs to compare"
    held = [finding for finding in findings if finding.holds()]
    refuting = [finding for finding in findings if finding.fails(len(findings))]
    verdict: Verdict = "fails" if refuting else "not decided"
    shown = refuting or [finding for finding in findings if finding not in held]
    if len(held) == len(findings):
        verdict, shown = "holds", held
    counts = [f"{len(held)} of {len(findings)} hold"] if len(findings) > 1 else []
    counts += [f"{len(refuting)} fail"] if refuting else []
    worst = sorted(shown, key=lambda finding: -finding.distance())[:_SHOWN_FINDINGS]
    return verdict, "; ".join([", ".join(counts), *map(str, worst)] if counts else map(str, worst))


def decides(number: str) -> Callable[[Rule], Rule]:
    """Enter a rule into `RULES`, by the number of its claim."""

    def enter(rule: Rule) -> Rule:
        RULES[number] = rule
        return rule

    return enter
