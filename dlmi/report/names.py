"""What a report calls things: methods in the words of the DLMI paper, prompts, difficulties."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dlmi.rows import Inversion

# Settings that do not tell methods apart: they have axes of their own in a report.
_AXES = {"prompt_length", "steps", "token_budget", "eval_every", "decode_at", "seed"}
# What a prompt may be, unrestricted. Rows from before there was a choice lack them.
_UNRESTRICTED = {"allowed_tokens": "all", "forbid_target_tokens": "none", "fluency": 0.0}
_FORMS = {
    "best_so_far": "best so far",
    "argmax": "argmax of the last step",
    "softmax": "softmax without noise",
    "gumbel_sample": "Gumbel sample",
}

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
    samples and tau may differ, and so may what a prompt may hold (`restrictions`).
    """
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


def restrictions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Where prompts may not be whatever works, as in the paper; null leaves that to the method.

    >>> restrictions({"allowed_tokens": "all", "forbid_target_tokens": "words", "fluency": None})
    {'forbid_target_tokens': 'words'}
    """
    return {
        name: settings[name]
        for name, free in _UNRESTRICTED.items()
        if settings.get(name) not in (None, free)
    }


def shared_restrictions(rows: Iterable[Inversion]) -> dict[str, Any]:
    """The restrictions that hold for every one of these rows."""
    found = [restrictions(row.settings) for row in rows]
    first = found[0] if found else {}
    return {name: v for name, v in first.items() if all(own.get(name) == v for own in found)}


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as labels show them.

    >>> settings_text({"forbid_target_tokens": "words", "lr": 0.1})
    'forbid_target_tokens=words lr=0.1'
    """
    return " ".join(f"{name}={value}" for name, value in settings.items())


def natural_order(label: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in labels by their size.

    >>> sorted(["DLMI(100)", "DLMI(20)", "ADC"], key=natural_order)
    ['ADC', 'DLMI(20)', 'DLMI(100)']
    """
    parts = re.split(r"(\d+)", label)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def run_labels(runs: Sequence[tuple[str | None, Sequence[Inversion]]]) -> list[str]:
    """What each run is called: its name in a comparison, else the paper's.

    Runs of one name that differ in settings get those added, and so do runs whose prompts are
    restricted, unless all are in the same way. Runs that differ only in where and with what they
    were made, or in settings that one of them does not know, are one method, but where they have
    done the same target with the same seed.
    """
    firsts = [rows[0] for _, rows in runs]
    shared = shared_restrictions(firsts)
    labels = [
        paper_name(rows[0].method, rows[0].settings) if name is None else name
        for name, rows in runs
    ]
    settings = [{"method": row.method, **_UNRESTRICTED, **_as_now(row.settings)} for row in firsts]
    usual = {name: free for name, free in _UNRESTRICTED.items() if name not in shared}
    labels = _told_apart(labels, settings, usual)
    done = Counter(
        (label, row.target_set, row.target_id, row.seed, len(row.prompt_ids))
        for label, (_, rows) in zip(labels, runs, strict=True)
        for row in rows
    )
    twice = {label for (label, *_), count in done.items() if count > 1}
    everything = dict.fromkeys(name for own in settings for name in own)
    where = [
        {**everything, **own, **row.versions, "device": row.device} if label in twice else {}
        for label, own, row in zip(labels, settings, firsts, strict=True)
    ]
    return _told_apart(labels, where, {})


def _told_apart(
    labels: Sequence[str], settings: Sequence[Mapping[str, Any]], usual: Mapping[str, Any]
) -> list[str]:
    """Labels with the settings in which those of one name differ, or are not as usual."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for label, own in zip(labels, settings, strict=True):
        for name, value in own.items():
            both = (value, usual.get(name, value))
            values[label, name] |= {json.dumps(each, sort_keys=True) for each in both}
    shown = [
        {n: value for n, value in own.items() if len(values[label, n]) > 1 and n not in _AXES}
        for label, own in zip(labels, settings, strict=True)
    ]
    return [f"{n} {settings_text(own)}".strip() for n, own in zip(labels, shown, strict=True)]


def _as_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls that leave prompts to the method, and `refine_*` where no search followed."""
    is_alone = settings.get("refine_after") == 1
    return {
        name: value
        for name, value in settings.items()
        if not (name in _UNRESTRICTED and value is None)
        and not (is_alone and name.startswith("refine_"))
    }


def form_name(form: str) -> str:
    """A form of the prompt in words.

    >>> form_name("best_of_8_samples")
    'best of 8 samples'
    """
    return _FORMS.get(form, form.replace("_", " "))
