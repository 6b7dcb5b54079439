"""`python -m dlmi score`: do prompts make an LM answer more questions right?"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlmi.cli.parser import CommandParser, check_new_file, default_device
from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.loading import PACKAGED, load_lm
from dlmi.lm.placement import split_dtype_name
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
from dlmi.targets.template import Template
from dlmi.text import visible

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


def score_command(arguments: list[str]) -> int:
    """Score prompts and their baselines; print a table, and write everything if asked."""
    config = make_parser().parse_args(arguments)
    rows = [] if config.results is None else read_rows(config.results)
    _fill_in(config, rows)
    if config.out is not None:
        check_new_file(config.out)
    if config.draws < 0:
        raise InputError(f"Expected `draws` to be at least 0, but got {config.draws}.")
    template = Template(config.template, config.chat, setting="template")
    check_template(template)
    decoding = Decoding(
        config.max_new_tokens,
        "\n" if config.one_line else None,
        config.trigger.replace("\\n", "\n") if config.two_stages else None,
        config.max_reasoning_tokens,
        config.batch_size,
    )
    questions = load_questions(config.examples, config.split, config.limit)
    dtype, bits = split_dtype_name(config.dtype)
    lm = load_lm(config.lm, dtype, default_device(), quantization=bits)
    prompts = _prompts(lm, config.prompt, config.prompt_ids, rows)
    scores: dict[str, Accuracy] = {}
    named = score_each(lm, template, prompts, questions, decoding, config.draws, config.seed)
    for name, score in named:
        print(f"{name}: {score.right} of {len(score.answered)} right", file=sys.stderr)
        scores[name] = score
    Console().print(scores_table(scores, f"{len(questions)} questions to {lm.name}"))
    if config.out is not None:
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in config.as_dict().items()
        }
        config.out.write_text(as_json(scores, settings), encoding="utf-8")
        print(f"every answer is in {config.out}")
    return 0


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m dlmi score",
        usage="python -m dlmi score [options]",
        description=(
            "Ask an LM questions with a prompt in the slot of a template, and count the right "
            "answers; beside it an empty slot, a phrase and random tokens. The prompts of a run "
            "(--results) are asked as the run has asked: same LM, template and reasoning."
        ),
    )
    add = parser.add_argument
    add("--prompt", type=str | list[str] | None, default=None, help="A prompt, or a list of them.")
    add("--prompt_ids", type=list[int] | None, default=None, help="A prompt as token ids.")
    add(
        "--results",
        type=Path | None,
        default=None,
        help="A results.jsonl, or its run folder, whose prompts are scored as ids.",
    )
    add(
        "--examples",
        type=str,
        default=PACKAGED_QUESTIONS,
        help="`sums` (packaged), a JSONL file as of GSM8k, or `hub:NAME`.",
    )
    add("--split", type=Split, default="test", help="Which part; a file has none.")
    add("--limit", type=int | None, default=None, help="Take only the first examples.")
    _add_unset(add, "template", str, "With {question} and {slot}, each once.")
    _add_unset(add, "chat", bool, "Make it the user's message of a chat.")
    _add_unset(add, "lm", str, "As in `fit`'s `data`.")
    _add_unset(add, "dtype", str, "As in `fit`'s `data`.")
    add("--max_new_tokens", type=int, default=48, help="Tokens of an answer at most.")
    add("--one_line", type=bool, default=True, help="An answer ends with its line.")
    _add_unset(add, "two_stages", bool, "Let the LM write its reasoning first, then the trigger.")
    _add_unset(add, "trigger", str, "What is put behind it; \\n is a new line.")
    _add_unset(add, "max_reasoning_tokens", int, "Tokens of the reasoning at most.")
    add("--batch_size", type=int, default=16, help="Questions decoded side by side.")
    add("--draws", type=int, default=3, help="Random prompts to compare with.")
    add("--seed", type=int, default=0, help="Of these.")
    add("--out", type=Path | None, default=None, help="JSON with every answer; must not exist.")
    return parser


def _add_unset(add: Callable[..., Any], name: str, kind: Any, text: str) -> None:
    """An option that is taken from the rows of a run where the user leaves it out."""
    usual = _USUAL[name] if isinstance(_USUAL[name], str) else json.dumps(_USUAL[name])
    note = f"{text} Unset: that of --results, else {usual}."
    add(f"--{name}", type=kind | None, default=None, help=note)


def _fill_in(config: Namespace, rows: Sequence[Inversion]) -> None:
    """Set what the user left out as the run did that the rows are of, or as usual."""
    recorded = [_recorded(row) for row in rows]
    for name, usual in _USUAL.items():
        if config[name] is not None:
            continue
        values = {values[name] for values in recorded if name in values}
        if len(values) > 1:
            raise InputError(
                f"Expected `--{name}` to be given with rows that differ in it, but it is unset "
                f"({', '.join(sorted(map(repr, values)))} in {config.results})."
            )
        config[name] = values.pop() if values else usual


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


def _prompts(
    lm: FrozenLM,
    texts: str | list[str] | None,
    ids: list[int] | None,
    rows: Sequence[Inversion],
) -> list[str | Sequence[int]]:
    prompts: list[str | Sequence[int]] = []
    prompts += [texts] if isinstance(texts, str) else texts or []
    if ids:
        prompts.append(ids)
    prompts += [row.prompt_ids for row in rows]
    for prompt in prompts:
        if not isinstance(prompt, str):
            lm.check_ids(prompt, "a prompt")
    return prompts


def scores_table(scores: dict[str, Accuracy], title: str) -> Table:
    """A row per prompt: right answers, accuracy, its interval and the relative change."""
    table = Table(title=title, title_justify="left")
    table.add_column("slot")
    for heading in ("right", "accuracy", "95% interval", "change"):
        table.add_column(heading, justify="right")
    table.add_column("prompt", overflow="fold")
    for (name, score), change in zip(scores.items(), changes(scores).values(), strict=True):
        low, high = score.interval
        table.add_row(
            name,
            f"{score.right} of {len(score.answered)}",
            f"{score.value:.1%}",
            f"{low:.1%} to {high:.1%}",
            "-" if change is None else f"{change:+.1%}",
            Text(visible(score.prompt_text)),
        )
    return table


def as_json(scores: dict[str, Accuracy], settings: dict[str, Any]) -> str:
    """Everything, as one JSON object."""
    rows = []
    for (name, score), change in zip(scores.items(), changes(scores).values(), strict=True):
        rows.append(
            {
                "name": name,
                "prompt_text": score.prompt_text,
                "prompt_ids": score.prompt_ids,
                "right": score.right,
                "total": len(score.answered),
                "accuracy": score.value,
                "interval": score.interval,
                "relative_change": change,
                "answered": [vars(answer) for answer in score.answered],
            }
        )
    return json.dumps({"settings": settings, "scores": rows}, ensure_ascii=False, indent=1) + "\n"
