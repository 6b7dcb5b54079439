"""The claims of the DLMI paper that result rows can decide, in short."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dlmi.report import claim_rules as rules
from dlmi.report.scene import Scene
from dlmi.report.verdicts import Finding


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the paper and how one group decides it.

    Attributes:
        number: In the checklist; letters where the paper's sentence says several things.
        statement: In short.
        metric: What it is decided on.
        rule: Findings of a scene.
        needs: What runs must hold for it to be tested.
        has_two_metrics: Whether the as-in-code LCS could say something else.
    """

    number: str
    statement: str
    rule: Callable[[Scene], Iterator[Finding]]
    needs: str
    metric: str = "honest LCS"
    has_two_metrics: bool = True


CLAIMS = (
    Claim(
        number="1a",
        statement="DLMI is best in all settings",
        rule=rules.dlmi_is_best,
        needs="DLMI and another method",
    ),
    Claim(
        number="1b",
        statement="DLMI is near-perfect (LCS > 0.9) at N=80 and 2048 steps",
        rule=rules.dlmi_is_near_perfect,
        needs="DLMI at N >= 80 and 2048 steps",
    ),
    Claim(
        number="2",
        statement="REINFORCE is very poor (LCS < 0.2) everywhere",
        rule=rules.reinforce_is_poor,
        needs="REINFORCE without teacher forcing",
    ),
    Claim(
        number="3a",
        statement="GBDA is barely above REINFORCE (by -0.02 to 0.1)",
        rule=rules.gbda_barely_beats_reinforce,
        needs="GBDA and REINFORCE without teacher forcing",
    ),
    Claim(
        number="3b",
        statement="GBDA is below DLMI-TF",
        rule=rules.gbda_is_below_dlmi,
        needs="GBDA and DLMI-TF",
    ),
    Claim(
        number="3c",
        statement="That gap grows with k",
        rule=rules.gbda_gap_grows,
        needs="GBDA and DLMI-TF at several k",
    ),
    Claim(
        number="4",
        statement="Learned decoupled temperatures matter most (more than teacher forcing)",
        rule=rules.temperature_matters_most,
        needs="DLMI, DLMI-TF of the same tau0, and GBDA",
    ),
    Claim(
        number="5",
        statement="Teacher forcing saves steps (DLMI above DLMI-TF at the smallest budget)",
        rule=rules.forcing_saves_steps,
        needs="DLMI and DLMI-TF of the same tau0",
    ),
    Claim(
        number="6a",
        statement="Longer prompts are better for all methods",
        rule=rules.longer_prompts_are_better,
        needs="two prompt lengths",
    ),
    Claim(
        number="6b",
        statement="At N=80 DLMI leads on hard targets",
        rule=rules.dlmi_leads_on_hard_targets,
        needs="DLMI and another method at N >= 80",
    ),
    Claim(
        number="8a",
        statement="DLMI is robust in k (falls by less than 0.1)",
        rule=rules.dlmi_is_robust,
        needs="DLMI at several k",
    ),
    Claim(
        number="8b",
        statement="SODA degrades in k",
        rule=rules.soda_degrades,
        needs="SODA at several k",
    ),
    Claim(
        number="8c",
        statement="SODA is flat after about 200 steps",
        rule=rules.soda_is_flat,
        needs="SODA with at least 400 steps",
    ),
    Claim(
        number="9",
        statement="Anytime: DLMI does not get worse from the smallest to the largest budget",
        metric="honest LCS of the moment, not the best so far",
        rule=rules.more_steps_do_no_harm,
        needs="DLMI or DLMI-TF at two budgets",
    ),
    Claim(
        number="13",
        statement="DLMI(100)-TF is above DLMI(1)-TF at N=80",
        rule=rules.higher_tau_is_better,
        needs="both at N >= 80",
    ),
    Claim(
        number="14",
        statement="The mean temperature falls within 256 steps (a figure without a stated trend)",
        metric="log10 of tau at the end over the start",
        rule=rules.temperature_falls,
        needs="DLMI or DLMI-TF with two evaluations",
        has_two_metrics=False,
    ),
    Claim(
        number="15",
        statement="Prompts overlap with their targets by less than 20%, for all methods",
        metric="overlap ratio",
        rule=rules.overlap_is_small,
        needs="any method",
        has_two_metrics=False,
    ),
    Claim(
        number="16",
        statement="Prompt perplexity is above the size of the vocabulary",
        metric="ln of perplexity; V from the largest token id seen",
        rule=rules.perplexity_is_huge,
        needs="prompts of two or more tokens",
        has_two_metrics=False,
    ),
)
