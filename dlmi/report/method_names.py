"""Methods by their settings, in the words of the DLMI paper."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dlmi.rows import Inversion

# Settings that do not tell methods apart: they have axes of their own in a report.
_AXES = {"prompt_length", "steps", "token_budget", "eval_every", "seed"}
# What a prompt may be, unrestricted. Rows from before there was a choice lack them.
_UNRESTRICTED = {"allowed_tokens": "all", "forbid_target_tokens": "none", "fluency": 0.0}

Role = Literal["DLMI", "DLMI-TF", "GBDA", "REINFORCE", "SODA"]


def paper_name(method: str, settings: Mapping[str, Any]) -> str:
    """A method as the DLMI paper writes it; "-TF" is minus teacher forcing.

    >>> paper_name("DLMI", {"tau0": 100.0, "teacher_forcing": False, "temperature": "decoupled"})
    'DLMI(100)-TF'
    """
    first = settings.get("first")
    if method == "Refined" and isinstance(first, dict):
        return f"{paper_name(str(first.get('method')), first)} + search"
    forced = settings.get("teacher_forcing")
    if method == "DLMI" and isinstance(settings.get("tau0"), int | float):
        kind = settings.get("temperature", "decoupled")
        kind = "" if kind == "decoupled" else f", {kind}"
        return f"DLMI({settings['tau0']:g}{kind}){'-TF' if forced is False else ''}"
    if method == "GBDA" and isinstance(settings.get("tau"), int | float):
        return f"GBDA({settings['tau']:g}){'+TF' if forced else ''}"
    return f"REINFORCE{'+TF' if forced else ''}" if method == "REINFORCE" else method


def paper_role(method: str, settings: Mapping[str, Any]) -> Role | None:
    """Which of the paper's methods this is, whatever its label; None for what it does not have.

    What makes the method must agree (estimator, temperature, teacher forcing, loss); step size,
    samples and tau may differ. The paper's prompts may hold any token and need not be likely.
    """
    if any(_is_restricted(name, settings) for name in _UNRESTRICTED):
        return None
    has_paper_loss = settings.get("loss", "cross_entropy") == "cross_entropy"
    is_relaxed = settings.get("estimator", "gumbel_softmax") == "gumbel_softmax"
    forced = bool(settings.get("teacher_forcing"))
    if method == "DLMI" and has_paper_loss and is_relaxed:
        if settings.get("temperature") == "decoupled":
            # Earlier rows have a name, and a temperature even where it is of no use.
            greedy = "greedy" if "next_token" in settings else None
            is_greedy = settings.get("next_token", settings.get("next_token_tau")) == greedy
            return "DLMI" if forced else "DLMI-TF" if is_greedy else None
        return "GBDA" if settings.get("temperature") == "fixed" and not forced else None
    if method == "GBDA" and has_paper_loss and is_relaxed and not forced:
        is_plain = settings.get("tau_end") is None and not settings.get("final_samples")
        return "GBDA" if is_plain else None
    if method == "REINFORCE" and has_paper_loss and not forced:
        return "REINFORCE" if settings.get("baseline") in ("ema", "as_code") else None
    return "SODA" if method == "SODA" and settings.get("loss", "margin") == "margin" else None


def natural_order(label: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in labels by their size.

    >>> sorted(["DLMI(100)", "DLMI(20)", "ADC"], key=natural_order)
    ['ADC', 'DLMI(20)', 'DLMI(100)']
    """
    parts = re.split(r"(\d+)", label)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def run_labels(names: Sequence[str | None], firsts: Sequence[Inversion]) -> list[str]:
    """What each run is called: its name in a comparison, else the paper's.

    Runs of one name that differ in settings get those added, and runs whose prompts may not be
    whatever works always say so.

    Args:
        names: In a comparison; None outside of one.
        firsts: One row of each run.
    """
    found = [
        paper_name(first.method, first.settings) if name is None else name
        for name, first in zip(names, firsts, strict=True)
    ]
    settings = [{"method": row.method, **_UNRESTRICTED, **_as_now(row.settings)} for row in firsts]
    labels = []
    for name, mine in zip(found, settings, strict=True):
        alike = [other for label, other in zip(found, settings, strict=True) if label == name]
        differing = [
            f"{key}={mine.get(key)}"
            for key in dict.fromkeys(key for other in alike for key in other)
            if key not in _AXES and (_differs(key, alike) or _is_restricted(key, mine))
        ]
        labels.append(f"{name} {' '.join(differing)}" if differing else name)
    return labels


def _as_now(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without nulls that leave it to the method what a prompt may be, and without `refine_after`.

    That and its width go where no search came after a relaxation.
    """
    is_alone = settings.get("refine_after") == 1
    return {
        name: value
        for name, value in settings.items()
        if not (name in _UNRESTRICTED and value is None)
        and not (is_alone and name.startswith("refine_"))
    }


def _is_restricted(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether prompts may not be whatever works; null leaves that to the method."""
    return name in _UNRESTRICTED and settings.get(name) not in (None, _UNRESTRICTED[name])


def _differs(name: str, settings: Iterable[dict[str, Any]]) -> bool:
    free = _UNRESTRICTED.get(name)
    values = (s.get(name) for s in settings)
    return len({json.dumps(free if v is None else v, sort_keys=True) for v in values}) > 1
