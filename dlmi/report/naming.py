"""What a report calls things: methods by their settings, LMs, budgets and prompt forms."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dlmi.report.loading import Axis, Group

Role = Literal["DLMI", "DLMI-TF", "GBDA", "REINFORCE", "SODA"]

AXIS_UNITS: "dict[Axis, str]" = {
    "step": "steps",
    "token_passes": "token passes",
    "seconds": "seconds",
}
FORM_NAMES = {
    "best_so_far": "best so far",
    "argmax": "argmax of the last step",
    "softmax": "softmax without noise",
    "gumbel_sample": "Gumbel sample",
    "no_prompt": "no prompt",
    "random_prompt": "random prompt",
    "copy_prompt": "copy prompt",
}


def paper_name(method: str, settings: Mapping[str, Any]) -> str:
    """A method as the DLMI paper writes it; "-TF" is minus teacher forcing.

    >>> paper_name("DLMI", {"tau0": 100.0, "teacher_forcing": False, "temperature": "decoupled"})
    'DLMI(100)-TF'
    """
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
    samples and tau may differ.
    """
    has_paper_loss = settings.get("loss", "cross_entropy") == "cross_entropy"
    is_relaxed = settings.get("estimator", "gumbel_softmax") == "gumbel_softmax"
    forced = bool(settings.get("teacher_forcing"))
    if method == "DLMI" and has_paper_loss and is_relaxed:
        if settings.get("temperature") == "decoupled":
            is_greedy = settings.get("next_token", "greedy") == "greedy"
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


def group_names(groups: "Sequence[Group]") -> list[str]:
    """The LM's name, with dtype, targets and weights only where it takes them to tell apart.

    A folder's path is cut to its last part.
    """
    names = [re.split(r"[/\\]", group.model.rstrip("/\\"))[-1] for group in groups]
    details = [
        [group.dtype for group in groups],
        [f"targets {group.target_set[:8]}" for group in groups],
        [f"weights {group.fingerprint[:8]}" for group in groups],
    ]
    for detail in details:
        twice = {name for name in names if names.count(name) > 1}
        for name in twice:
            places = [i for i, other in enumerate(names) if other == name]
            if len({detail[i] for i in places}) > 1:
                for i in places:
                    names[i] = f"{names[i]}, {detail[i]}"
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def budget_name(axis: "Axis", at: float) -> str:
    """A budget in words.

    >>> budget_name("step", 2048.0)
    '2048 steps'
    """
    amount = f"{at:g}" if at < 100_000 else f"{at:.3g}"
    return f"{amount} {AXIS_UNITS[axis]}"


def form_name(form: str) -> str:
    """A form of the prompt in words.

    >>> form_name("best_of_8_samples")
    'best of 8 samples'
    """
    return FORM_NAMES.get(form, form.replace("_", " "))


def k_name(k: int | None) -> str:
    """A difficulty; targets that were not generated have none."""
    return "text" if k is None else str(k)
