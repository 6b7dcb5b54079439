"""`python -m dlmi score`: do prompts make an LM answer more questions right?"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlmi.commands import CommandParser, check_new_file, default_device
from dlmi.display import visible
from dlmi.errors import InputError
from dlmi.lm import FrozenLM
from dlmi.models import PACKAGED, load_lm
from dlmi.placement import DType
from dlmi.prompt_engineering.baselines import changes, score_each
from dlmi.prompt_engineering.examples import PACKAGED_EXAMPLES, Split, load_examples
from dlmi.prompt_engineering.scoring import TRIGGER, Accuracy, Decoding
from dlmi.prompt_engineering.template import DEFAULT_TEMPLATE, QuestionTemplate
from dlmi.results import read_rows


def score_command(arguments: list[str]) -> int:
    """Score prompts and their baselines; print a table, and write everything if asked."""
    parser = _parser()
    config = parser.parse_args(arguments)
    if config.out is not None:
        check_new_file(config.out)
    if config.draws < 0:
        raise InputError(f"Expected `draws` to be at least 0, but got {config.draws}.")
    template = QuestionTemplate(config.template, config.chat)
    decoding = Decoding(
        config.max_new_tokens,
        "\n" if config.one_line else None,
        config.trigger.replace("\\n", "\n") if config.two_stages else None,
        config.max_reasoning_tokens,
        config.batch_size,
    )
    examples = load_examples(config.examples, config.split, config.limit)
    lm = load_lm(config.lm, config.dtype, default_device())
    prompts = _prompts(lm, config.prompt, config.prompt_ids, config.results)
    scores: dict[str, Accuracy] = {}
    named = score_each(lm, template, prompts, examples, decoding, config.draws, config.seed)
    for name, score in named:
        print(f"{name}: {score.right} of {len(score.answered)} right", file=sys.stderr)
        scores[name] = score
    Console().print(scores_table(scores, f"{len(examples)} questions to {lm.name}"))
    if config.out is not None:
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in config.as_dict().items()
        }
        config.out.write_text(as_json(scores, settings), encoding="utf-8")
        print(f"every answer is in {config.out}")
    return 0


def _parser() -> ArgumentParser:
    parser = CommandParser(
        prog="python -m dlmi score",
        usage="python -m dlmi score [options]",
        description=(
            "Ask an LM questions with a prompt in the slot of a template, and count the right "
            "answers; beside it an empty slot, a phrase and random tokens."
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
        default=PACKAGED_EXAMPLES,
        help="`sums` (packaged), a JSONL file as of GSM8k, or `hub:NAME`.",
    )
    add("--split", type=Split, default="test", help="Which part; a file has none.")
    add("--limit", type=int | None, default=None, help="Take only the first examples.")
    add(
        "--template",
        type=str,
        default=DEFAULT_TEMPLATE,
        help="With {question} and {slot}, each once.",
    )
    add("--chat", type=bool, default=True, help="Make it the user's message of a chat.")
    add("--lm", type=str, default=PACKAGED, help="As in `fit`'s `data`.")
    add("--dtype", type=DType, default="auto", help="As in `fit`'s `data`.")
    add("--max_new_tokens", type=int, default=48, help="Tokens of an answer at most.")
    add("--one_line", type=bool, default=True, help="An answer ends with its line.")
    add(
        "--two_stages",
        type=bool,
        default=False,
        help="Let the LM write its reasoning first, then put the trigger behind it.",
    )
    add("--trigger", type=str, default=TRIGGER, help="The trigger; \\n is a new line.")
    add("--max_reasoning_tokens", type=int, default=96, help="Tokens of the reasoning at most.")
    add("--batch_size", type=int, default=16, help="Questions decoded side by side.")
    add("--draws", type=int, default=3, help="Random prompts to compare with.")
    add("--seed", type=int, default=0, help="Of these.")
    add("--out", type=Path | None, default=None, help="JSON with every answer; must not exist.")
    return parser


def _prompts(
    lm: FrozenLM,
    texts: str | list[str] | None,
    ids: list[int] | None,
    results: Path | None,
) -> list[str | Sequence[int]]:
    prompts: list[str | Sequence[int]] = []
    prompts += [texts] if isinstance(texts, str) else texts or []
    if ids:
        prompts.append(ids)
    if results is not None:
        prompts += [row.prompt_ids for row in read_rows(results)]
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
