"""`python -m dlmi score`: the accuracy of an LM on questions, with and without prompts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dlmi.cli.output import check_new_file, print_table
from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError
from dlmi.lm.loading import PACKAGED, load_lm
from dlmi.lm.placement import default_device, split_dtype_name
from dlmi.questions.scoring import Accuracy, Decoding, changes, check_template, score_each
from dlmi.rows import Inversion, read_rows
from dlmi.targets.questions import (
    PACKAGED_QUESTIONS,
    QUESTION_TEMPLATE,
    TRIGGER,
    Split,
    load_questions,
)
from dlmi.targets.template import Messages, Template


@dataclass(frozen=True)
class Score:
    r"""Ask an LM questions with a prompt in the slot of a template, and count the right answers.

    An empty slot, a phrase and random tokens are scored for comparison. With --results, the LM, its
    dtype, the template and the reasoning are those of the rows unless they are given.

    Args:
        prompt: A prompt, or a list of them.
        prompt_ids: A prompt as token ids.
        results: A results.jsonl, or its run folder, whose prompts are scored as ids.
        examples: `sums` (packaged), a JSONL file as of GSM8k, or `hub:NAME`.
        split: Which part of a dataset; a file has none.
        limit: Take only the first examples.
        template: With {question} and {slot}, each once.
        chat: Make it the user's message of a chat.
        lm: As in `fit`'s `data`.
        dtype: As in `fit`'s `data`.
        max_new_tokens: Most tokens of an answer.
        one_line: End an answer at a newline.
        two_stages: Let the LM write its reasoning first, then the trigger.
        trigger: Text after the reasoning; \n is a newline.
        max_reasoning_tokens: Most tokens of the reasoning.
        batch_size: Questions decoded together.
        draws: Number of random prompts to compare with.
        seed: Of the random prompts.
        out: JSON with every answer; must not exist.
    """

    prompt: str | list[str] | None = None
    prompt_ids: list[int] | None = None
    results: Path | None = None
    examples: str = PACKAGED_QUESTIONS
    split: Split = "test"
    limit: int | None = None
    template: str | Messages = QUESTION_TEMPLATE
    chat: bool = True
    lm: str = PACKAGED
    dtype: str = "auto"
    max_new_tokens: int = 48
    one_line: bool = True
    two_stages: bool = False
    trigger: str = TRIGGER
    max_reasoning_tokens: int = Decoding.max_reasoning_tokens
    batch_size: int = 16
    draws: int = 3
    seed: int = 0
    out: Path | None = None


def make_parser() -> CommandParser:
    """The options."""
    return CommandParser.of("score", Score)


def score_command(arguments: list[str]) -> int:
    """Score prompts and their baselines, print a table and write all answers to `--out`."""
    parser = make_parser()
    results = parser.parse_args(arguments).results
    rows = [] if results is None else read_rows(results)
    given = {word.partition("=")[0].removeprefix("--") for word in arguments}
    parser.set_defaults(_recorded(rows, given))
    asked = Score(**parser.read(arguments))
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
    texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt or []
    ids = [*([asked.prompt_ids] if asked.prompt_ids else []), *(row.prompt_ids for row in rows)]
    for prompt_ids in ids:
        lm.check_ids(prompt_ids, "a prompt")
    prompts: list[str | Sequence[int]] = [*texts, *ids]
    scores: dict[str, Accuracy] = {}
    for name, score in score_each(
        lm, template, prompts, questions, decoding, asked.draws, asked.seed
    ):
        print(f"{name}: {score.right} of {len(questions)} right", file=sys.stderr)
        scores[name] = score
    relative = changes(scores)
    found = [
        {
            "name": name,
            "prompt_text": score.prompt_text,
            "prompt_ids": score.prompt_ids,
            "right": score.right,
            "total": len(questions),
            "accuracy": score.value,
            "interval": score.interval,
            "relative_change": relative[name],
            "answered": score.answered,
        }
        for name, score in scores.items()
    ]
    columns = ("slot", "right", "accuracy", "95% interval", "change", "prompt")
    title = f"{len(questions)} questions to {lm.name}"
    print_table(title, columns, map(_cells, found), texts=["slot", "prompt"])
    if asked.out is not None:
        whole = msgspec.json.encode({"settings": asked, "scores": found}, enc_hook=str)
        asked.out.write_bytes(msgspec.json.format(whole, indent=1) + b"\n")
        print(f"every answer is in {asked.out}")
    return 0


def _cells(score: dict[str, Any]) -> list[str]:
    cells = "{name}|{right} of {total}|{accuracy:.1%}|{interval[0]:.1%} to {interval[1]:.1%}"
    change = "-" if score["relative_change"] is None else f"{score['relative_change']:+.1%}"
    return [*cells.format(**score).split("|"), change, score["prompt_text"]]


def _recorded(rows: Sequence[Inversion], given: set[str]) -> dict[str, Any]:
    """The options that rows were made with, except those that are given."""
    found: dict[str, Any] = {}
    for row in rows:
        values: dict[str, Any] = {"lm": row.model, "dtype": row.dtype}
        context = row.examples[0].context if row.examples else row.context
        if context is not None and context.template is not None:
            values |= {"template": context.template, "chat": context.chat}
            values["two_stages"] = context.reasoning is not None
            if context.reasoning is not None:
                values["trigger"] = context.reasoning.trigger
                values["max_reasoning_tokens"] = context.reasoning.max_tokens
        for name in values.keys() - given:
            if found.setdefault(name, values[name]) != values[name]:
                raise InputError(
                    f"Expected `--{name}` to be given with rows that differ in it, but it is not "
                    f"({found[name]!r} and {values[name]!r})."
                )
    return found
