"""Names of methods in the words of the DLMI paper, labels of runs, and forms of the prompt."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dlmi.rows import Inversion

# Settings that do not tell methods apart: a report has an axis for each of them.
_AXES = {"prompt_length", "steps", "token_budget", "eval_every", "decode_at", "seed"}
# The arithmetic of the LM's passes tells methods apart only where both have done a target.
_PASSES = {"precision", "pass_dtype"}
# What a prompt may be, unrestricted. Rows from before there was a choice lack them.
_UNRESTRICTED = {"allowed_tokens": "all", "forbid_target_tokens": "none", "fluency": 0.0}
_FORMS = {
    "argmax": "argmax of the last step",
    "softmax": "softmax without noise",
    "gumbel_sample": "Gumbel sample",
}

Role = Literal["DLMI", "DLMI-TF", "GBDA", "REINFORCE", "SODA"]

# The paper's methods: the name of the method and the values that some settings may have. A setting
# that a row lacks counts as the first of them.
_LOSS = {"loss": ("cross_entropy",)}
_RELAXED = {**_LOSS, "estimator": ("gumbel_softmax",)}
_FREE = {"teacher_forcing": (False, None)}
_ROLES: tuple[tuple[Role, str, dict[str, tuple[Any, ...]]], ...] = (
    ("DLMI", "DLMI", {**_RELAXED, "temperature": ("decoupled",), "teacher_forcing": (True,)}),
    ("DLMI-TF", "DLMI", {**_RELAXED, "temperature": ("decoupled",), "next_token_tau": (None,)}),
    ("GBDA", "DLMI", {**_RELAXED, **_FREE, "temperature": ("fixed",)}),
    ("GBDA", "GBDA", {**_RELAXED, **_FREE, "tau_end": (None,), "final_samples": (0, None)}),
    ("REINFORCE", "REINFORCE", {**_LOSS, **_FREE, "baseline": ("ema", "as_code")}),
    ("SODA", "SODA", {"loss": ("margin",)}),
)


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
    """Which of the paper's methods this is, whatever its label; None for any other.

    Estimator, temperature, teacher forcing and loss must agree; step size, samples and tau may
    differ, and so may what a prompt may hold (`restrictions`).
    """
    known = _as_now(settings)
    for role, name, needed in _ROLES:
        if method == name and all(known.get(n, vs[0]) in vs for n, vs in needed.items()):
            return role
    return None


def restrictions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that restrict which prompts are allowed; null leaves that to the method.

    >>> restrictions({"allowed_tokens": "all", "forbid_target_tokens": "words", "fluency": None})
    {'forbid_target_tokens': 'words'}
    """
    return {
        name: settings[name]
        for name, free in _UNRESTRICTED.items()
        if settings.get(name) not in (None, free)
    }


def shared_restrictions(rows: Iterable[Inversion]) -> dict[str, Any]:
    """The restrictions that all of these rows share."""
    first, *others = [restrictions(row.settings) for row in rows] or [{}]
    return {name: v for name, v in first.items() if all(own.get(name) == v for own in others)}


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as labels show them: `forbid_target_tokens=words lr=0.1`."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def natural_order(label: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in labels by their size.

    >>> sorted(["DLMI(100)", "DLMI(20)", "ADC"], key=natural_order)
    ['ADC', 'DLMI(20)', 'DLMI(100)']
    """
    parts = re.split(r"(\d+)", label)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def run_labels(runs: Sequence[tuple[str | None, Sequence[Inversion]]]) -> list[str]:
    """The label of each run: its name in a comparison, otherwise the paper's.

    Settings are added where runs of one name differ in them, and restrictions of the prompt that
    not all runs share. Versions, devices, the dtype of the passes, and settings that some rows lack
    are added only where two runs of one label have done the same target with the same seed.
    """
    firsts = [rows[0] for _, rows in runs]
    shared = shared_restrictions(firsts)
    labels = [
        paper_name(rows[0].method, rows[0].settings) if name is None else name
        for name, rows in runs
    ]
    settings = [{"method": row.method, **_UNRESTRICTED, **_as_now(row.settings)} for row in firsts]
    usual = {name: free for name, free in _UNRESTRICTED.items() if name not in shared}
    labels = _told_apart(labels, settings, usual, _AXES | _PASSES)
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
    return _told_apart(labels, where, {}, _AXES)


def _told_apart(
    labels: Sequence[str],
    settings: Sequence[Mapping[str, Any]],
    usual: Mapping[str, Any],
    hidden: set[str],
) -> list[str]:
    """Labels with the settings in which runs of one label differ, or are not as usual."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for label, own in zip(labels, settings, strict=True):
        for name, value in own.items():
            both = (value, usual.get(name, value))
            values[label, name] |= {json.dumps(each, sort_keys=True) for each in both}
    shown = [
        {n: value for n, value in own.items() if len(values[label, n]) > 1 and n not in hidden}
        for label, own in zip(labels, settings, strict=True)
    ]
    return [f"{n} {settings_text(own)}".strip() for n, own in zip(labels, shown, strict=True)]


def _as_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as rows have them today, without nulls that leave a restriction to the method."""
    found = {n: v for n, v in settings.items() if n not in _UNRESTRICTED or v is not None}
    if found.pop("next_token", None) == "greedy":  # had a temperature all the same
        found["next_token_tau"] = None
    if found.get("refine_after") == 1:  # no search followed
        found = {n: v for n, v in found.items() if not n.startswith("refine_")}
    return found


def form_name(form: str) -> str:
    """A form of the prompt in words."""
    return _FORMS.get(form, form.replace("_", " "))
