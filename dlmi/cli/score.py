"""`python -m dlmi score`: do prompts make an LM answer more questions right?"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from dlmi.cli.output import check_new_file, table
from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError
from dlmi.lm.loading import PACKAGED, load_lm
from dlmi.lm.placement import default_device, split_dtype_name
from dlmi.questions.baselines import changes, score_each
from dlmi.questions.scoring import Accuracy, Decoding, check_template
from dlmi.rows import Inversion, read_rows
from dlmi.targets.questions import (
    PACKAGED_QUESTIONS,
    QUESTION_TEMPLATE,
    TRIGGER,
    Split,
    load_questions,
)
from dlmi.targets.template import Messages, Template

# What holds where neither the user nor the rows of a run say anything else.
_USUAL: dict[str, Any] = {
    "lm": PACKAGED,
    "dtype": "auto",
    "template": QUESTION_TEMPLATE,
    "chat": True,
    "two_stages": False,
    "trigger": TRIGGER,
    "max_reasoning_tokens": Decoding.max_reasoning_tokens,
}


@dataclass(frozen=True)
class Score:
    r"""Ask an LM questions with a prompt in the slot of a template, and count the right answers.

    Beside it an empty slot, a phrase and random tokens. The prompts of a run (--results) are asked
    as the run has asked: what is unset is that of its rows, else what stands in parentheses.

    Args:
        prompt: A prompt, or a list of them.
        prompt_ids: A prompt as token ids.
        results: A results.jsonl, or its run folder, whose prompts are scored as ids.
        examples: `sums` (packaged), a JSONL file as of GSM8k, or `hub:NAME`.
        split: Which part; a file has none.
        limit: Take only the first examples.
        template: With {question} and {slot}, each once (one that asks for the number alone).
        chat: Make it the user's message of a chat (true).
        lm: As in `fit`'s `data` (the packaged one).
        dtype: As in `fit`'s `data` (auto).
        max_new_tokens: Tokens of an answer at most.
        one_line: An answer ends with its line.
        two_stages: Let the LM write its reasoning first, then the trigger (false).
        trigger: What is put behind it; \n is a new line (\n####).
        max_reasoning_tokens: Tokens of the reasoning at most (96).
        batch_size: Questions decoded side by side.
        draws: Random prompts to compare with.
        seed: Of these.
        out: JSON with every answer; must not exist.
    """

    prompt: str | list[str] | None = None
    prompt_ids: list[int] | None = None
    results: Path | None = None
    examples: str = PACKAGED_QUESTIONS
    split: Split = "test"
    limit: int | None = None
    template: str | Messages | None = None
    chat: bool | None = None
    lm: str | None = None
    dtype: str | None = None
    max_new_tokens: int = 48
    one_line: bool = True
    two_stages: bool | None = None
    trigger: str | None = None
    max_reasoning_tokens: int | None = None
    batch_size: int = 16
    draws: int = 3
    seed: int = 0
    out: Path | None = None


def make_parser() -> CommandParser:
    """The options."""
    return CommandParser.of("score", Score)


def score_command(arguments: list[str]) -> int:
    """Score prompts and their baselines; print a table, and write everything if asked."""
    options = Score(**make_parser().read(arguments))
    rows = [] if options.results is None else read_rows(options.results)
    asked: Any = _filled_in(options, rows)
    check_new_file(asked.out)
    if asked.draws < 0:
        raise InputError(f"Expected `draws` to be at least 0, but got {asked.draws}.")
    template = Template(asked.template, asked.chat, setting="`template`")
    check_template(template)
    decoding = Decoding(
        asked.max_new_tokens,
        "\n" if asked.one_line else None,
        asked.trigger.replace("\\n", "\n") if asked.two_stages else None,
        asked.max_reasoning_tokens,
        asked.batch_size,
    )
    questions = load_questions(asked.examples, asked.split, asked.limit)
    dtype, bits = split_dtype_name(asked.dtype)
    lm = load_lm(asked.lm, dtype, default_device(), quantization=bits)
    ids = [*([asked.prompt_ids] if asked.prompt_ids else []), *(row.prompt_ids for row in rows)]
    for prompt_ids in ids:
        lm.check_ids(prompt_ids, "a prompt")
    texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt or []
    scores: dict[str, Accuracy] = {}
    for name, score in score_each(
        lm, template, [*texts, *ids], questions, decoding, asked.draws, asked.seed
    ):
        print(f"{name}: {score.right} of {len(score.answered)} right", file=sys.stderr)
        scores[name] = score
    found = _rows(scores)
    Console().print(_table(found, f"{len(questions)} questions to {lm.name}"))
    if asked.out is not None:
        whole = msgspec.json.encode({"settings": asked, "scores": found}, enc_hook=str)
        asked.out.write_bytes(msgspec.json.format(whole, indent=1) + b"\n")
        print(f"every answer is in {asked.out}")
    return 0


def _filled_in(options: Score, rows: Sequence[Inversion]) -> Score:
    """With what the user left out as the run did that the rows are of, or as usual."""
    found = {}
    for name in (name for name in _USUAL if getattr(options, name) is None):
        values = {seen[name] for row in rows if name in (seen := _recorded(row))}
        if len(values) > 1:
            raise InputError(
                f"Expected `--{name}` to be given with rows that differ in it, but it is unset "
                f"({', '.join(sorted(map(repr, values)))} in {options.results})."
            )
        found[name] = values.pop() if values else _USUAL[name]
    return replace(options, **found)


def _recorded(row: Inversion) -> dict[str, Any]:
    """How the LM was asked for a row."""
    values: dict[str, Any] = {"lm": row.model, "dtype": row.dtype}
    context = row.examples[0].context if row.examples else row.context
    if context is None or context.template is None:
        return values
    values |= {"template": context.template, "chat": context.chat}
    values["two_stages"] = context.reasoning is not None
    if context.reasoning is not None:
        values["trigger"] = context.reasoning.trigger
        values["max_reasoning_tokens"] = context.reasoning.max_tokens
    return values


def _rows(scores: dict[str, Accuracy]) -> list[dict[str, Any]]:
    """What is told of each prompt."""
    relative = changes(scores)
    return [
        {
            "name": name,
            "prompt_text": score.prompt_text,
            "prompt_ids": score.prompt_ids,
            "right": score.right,
            "total": len(score.answered),
            "accuracy": score.value,
            "interval": score.interval,
            "relative_change": relative[name],
            "answered": score.answered,
        }
        for name, score in scores.items()
    ]


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    shown = "{name}|{right} of {total}|{accuracy:.1%}|{interval[0]:.1%} to {interval[1]:.1%}"
    lines = []
    for row in rows:
        change = "-" if row["relative_change"] is None else f"{row['relative_change']:+.1%}"
        lines.append((*shown.format(**row).split("|"), change, row["prompt_text"]))
    columns = ("slot", "right", "accuracy", "95% interval", "change", "prompt")
    return table(title, columns, lines, texts=["slot", "prompt"])
