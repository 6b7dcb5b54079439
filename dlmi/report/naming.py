"""What a report calls things: LMs, budgets, prompt forms and difficulties."""

import re
from collections.abc import Sequence

from dlmi.report.loading import Axis, Group
from dlmi.report.page_data import group_names

AXIS_UNITS: dict[Axis, str] = {
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


def group_titles(groups: Sequence[Group]) -> list[str]:
    """As `group_names`, with folders cut to their last part where that leaves them distinct."""
    names = group_names(groups)
    short = [re.split(r"[/\\]", name.rstrip("/\\"))[-1] for name in names]
    return short if len(set(short)) == len(short) else names


def budget_name(axis: Axis, at: float) -> str:
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
