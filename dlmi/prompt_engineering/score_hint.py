"""The command that counts how many questions a learned prompt answers."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dlmi.models import PACKAGED
from dlmi.prompt_engineering.examples import HUB_MARK, PACKAGED_EXAMPLES
from dlmi.prompt_engineering.scoring import TRIGGER, Decoding
from dlmi.prompt_engineering.template import DEFAULT_TEMPLATE

if TYPE_CHECKING:
    from dlmi.data import TargetDataModule


def score_hint(data: "TargetDataModule", folder: Path) -> str:
    """`python -m dlmi score` with what asks the questions as a run has asked them.

    Args:
        data: Of the run, with questions.
        folder: Where its rows are.
    """
    assert data.questions is not None
    assert data.template is not None
    options = ["--results", str(folder)]
    if data.lm_name != PACKAGED:
        options += ["--lm", data.lm_name]
    if data.dtype != "auto":
        options += ["--dtype", data.dtype]
    if data.questions.startswith(HUB_MARK):
        options += ["--examples", data.questions]
    elif data.questions != PACKAGED_EXAMPLES:
        options += ["--examples", "OTHER_QUESTIONS.jsonl"]  # a file has no part that was held out
    if data.template.text != DEFAULT_TEMPLATE:
        options += ["--template", data.template.text]
    if not data.template.chat:
        options += ["--chat", "false"]
    if data.reasoning is not None:
        max_tokens, trigger = data.reasoning[0], data.reasoning[1].replace("\n", "\\n")
        options += ["--two_stages", "true"]
        if max_tokens != Decoding.max_reasoning_tokens:
            options += ["--max_reasoning_tokens", str(max_tokens)]
        if trigger != TRIGGER:
            options += ["--trigger", trigger]
    return f"python -m dlmi score {shlex.join(options)}"
