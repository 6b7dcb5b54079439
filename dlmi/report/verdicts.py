"""How a claim is decided from a number of findings, each an estimate with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlmi.report.estimates import Estimate

Verdict = Literal["holds", "fails", "not decided", "not tested"]

CONFIDENCE = 0.95
MIN_TARGETS = 3
NEGLIGIBLE = 0.02  # of LCS: a difference below it is none

_SHOWN_FINDINGS = 2


@dataclass(frozen=True)
class Finding:
    """One estimate that a claim says something about.

    Attributes:
        what: Which number, in words.
        estimate: The number.
        wanted: Where the claim puts it: between these two.
        refuted: Where it refutes the claim: below the first or above the second.
    """

    what: str
    estimate: Estimate
    wanted: tuple[float, float]
    refuted: tuple[float, float]

    @property
    def is_known(self) -> bool:
        """Whether there are enough targets for an interval."""
        return self.estimate.error is not None and self.estimate.targets >= MIN_TARGETS

    def holds(self) -> bool:
        """Whether the whole interval is where the claim wants it."""
        low, high = self.estimate.interval(CONFIDENCE)
        return self.is_known and self.wanted[0] < low and high < self.wanted[1]

    def fails(self, comparisons: int) -> bool:
        """Whether the whole interval refutes the claim.

        Args:
            comparisons: How many findings could have: the error is shared out among them.
        """
        low, high = self.estimate.interval(1 - (1 - CONFIDENCE) / comparisons)
        return self.is_known and (high < self.refuted[0] or low > self.refuted[1])

    def __str__(self) -> str:
        low, high = self.estimate.interval(CONFIDENCE)
        interval = f" [{low:.3f}, {high:.3f}]" if math.isfinite(low) else " (no interval)"
        return f"{self.what}: {self.estimate.mean:.3f}{interval}, {self.estimate.targets} targets"

    def distance(self) -> float:
        """How far the claim is from safe here: the larger, the worse."""
        low, high = self.estimate.interval(CONFIDENCE)
        return max(self.wanted[0] - low, high - self.wanted[1])


@dataclass(frozen=True)
class Outcome:
    """What became of a claim.

    Attributes:
        verdict: The verdict.
        evidence: The numbers that decided it, or what was missing.
    """

    verdict: Verdict
    evidence: str


def above(what: str, estimate: Estimate, bound: float = 0.0, margin: float = NEGLIGIBLE) -> Finding:
    """A claim that something lies above a bound; refuted where it clearly does not by a margin."""
    return Finding(what, estimate, (bound, math.inf), (bound + margin, math.inf))


def below(what: str, estimate: Estimate, bound: float, margin: float = 0.0) -> Finding:
    """A claim that something lies below a bound."""
    return Finding(what, estimate, (-math.inf, bound), (-math.inf, bound - margin))


def between(what: str, estimate: Estimate, low: float, high: float) -> Finding:
    """A claim that something lies within a range."""
    return Finding(what, estimate, (low, high), (low, high))


def decide(findings: Sequence[Finding]) -> Outcome:
    """Holds if every finding does; fails if one refutes it; else it is not decided.

    That all hold needs no correction for their number; that one fails does (Bonferroni).
    """
    if not findings:
        return Outcome("not tested", "no runs to compare")
    held = [finding for finding in findings if finding.holds()]
    refuting = [finding for finding in findings if finding.fails(len(findings))]
    if len(held) == len(findings):
        verdict: Verdict = "holds"
        shown = findings
    elif refuting:
        verdict, shown = "fails", refuting
    else:
        verdict, shown = "not decided", [finding for finding in findings if finding not in held]
    worst = sorted(shown, key=lambda finding: -finding.distance())[:_SHOWN_FINDINGS]
    counts = f"{len(held)} of {len(findings)} hold" if len(findings) > 1 else ""
    if refuting:
        counts += f"{', ' if counts else ''}{len(refuting)} fail"
    least = "; ".join(map(str, worst))
    return Outcome(verdict, f"{counts}; {least}" if counts else least)
