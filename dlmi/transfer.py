"""Does a found prompt also work elsewhere: in another dtype, or in another model?

Prompts go over as ids, which needs the same tokenizer, and as the text that one would paste. To a
model with another tokenizer only the text can go over; the target is then what that tokenizer makes
of the target's text.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlmi.display import visible
from dlmi.errors import InputError
from dlmi.evaluation import say
from dlmi.frames import Reasoning
from dlmi.lm import FrozenLM
from dlmi.metrics import lcs_ratio
from dlmi.models import load_lm, load_tokenizer
from dlmi.placement import DType
from dlmi.results import Inversion


@dataclass(frozen=True)
class Transfer:
    """How the prompt of one row does in one model and dtype.

    Attributes:
        target_id: Of the row.
        seed: Of the row.
        method: Of the row.
        model: Where the prompt was tried.
        dtype: In which dtype.
        was_exact: What the row says.
        was_lcs: The same.
        exact: Whether its ids make the model say the target; None if only text went over.
        lcs: Honest LCS ratio of its ids; None likewise.
        text_exact: Whether its pasted text does.
        text_lcs: Honest LCS ratio of its pasted text.
        output_text: What the model says to the ids, or to the text if only that went over.
    """

    target_id: str
    seed: int
    method: str
    model: str
    dtype: str
    was_exact: bool
    was_lcs: float
    exact: bool | None
    lcs: float | None
    text_exact: bool
    text_lcs: float
    output_text: str


def add_transfer_arguments(parser: ArgumentParser) -> None:
    """Options of `verify` that say where else prompts are tried."""
    parser.add_argument(
        "--lm",
        type=str | list[str] | None,
        default=None,
        help="Try the prompts in this model, or in each of a list. Default: that of the rows.",
    )
    parser.add_argument(
        "--dtype",
        type=DType | list[DType] | None,
        default=None,
        help="Try them in this dtype, or in each of a list. Default: that of the rows.",
    )
    parser.add_argument(
        "--as_text",
        type=bool,
        default=False,
        help="Send text instead of ids, for models with another tokenizer.",
    )
    parser.add_argument(
        "--out", type=Path | None, default=None, help="JSONL with each prompt; must not exist."
    )


def report_transfer(rows: Sequence[Inversion], config: Any, device: torch.device) -> int:
    """Try all prompts in all models and dtypes, and print how they do.

    Args:
        rows: With the prompts.
        config: `lm`, `dtype`, `as_text`, `out` and `bos`, as parsed.
        device: Where to load the models.
    """
    if not config.as_text:
        for name, other in itertools.product(_as_list(config.lm), {row.model for row in rows}):
            if name not in (None, other):
                check_same_tokens(name, other)
    tried: list[Transfer] = []
    for (name, dtype), members in _variants(rows, config.lm, config.dtype).items():
        lm = load_lm(name, dtype, device, config.bos)
        tried += [try_row(lm, row, config.as_text) for row in members]
    Console().print(transfer_table(rows, tried))
    if config.out is not None:
        lines = (json.dumps(dataclasses.asdict(t), ensure_ascii=False) + "\n" for t in tried)
        config.out.write_text("".join(lines), encoding="utf-8")
        print(f"{len(tried)} prompts in {config.out}")
    return 0


def check_same_tokens(name: str, other: str) -> None:
    """Raise `InputError` unless two models have the same token under every id."""
    mine, theirs = (
        {i: token for token, i in load_tokenizer(n).get_vocab().items()} for n in (name, other)
    )
    differing = sorted(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    if differing:
        first = differing[0]
        raise InputError(
            f"Expected `--lm` to have the tokenizer of {other}, but in {name} {len(differing)} ids "
            f"mean something else (id {first} is {mine.get(first)!r}, not {theirs.get(first)!r}). "
            "Use `--as_text true` to send the prompts as text."
        )


@torch.no_grad()
def try_row(lm: FrozenLM, row: Inversion, as_text: bool = False) -> Transfer:
    """Decode a row's prompt in a model, from its ids and from its text.

    Args:
        lm: The model.
        row: With the prompt; its ids are ids of the model unless `as_text`.
        as_text: Let the model's tokenizer read the target's text, and leave the ids out.
    """
    readings = row.target.readings
    wanted: list[tuple[int, ...]] = []
    from_text: list[tuple[int, ...]] = []
    from_ids: list[tuple[int, ...]] = []
    for example, (text, full_ids, full_text) in zip(readings, row.whole_prompts, strict=True):
        target_ids = tuple(lm.encode(text)) if as_text else example.ids
        if not target_ids or not row.prompt_ids:
            raise InputError(
                f"Expected row {row.target_id} to have a prompt and a target of tokens."
            )
        wanted.append(target_ids)
        reasoning = example.frame.reasoning
        from_text.append(_say(lm, row, lm.encode(full_text), len(target_ids), reasoning))
        if not as_text:
            lm.check_ids([*full_ids, *target_ids], f"row {row.target_id}")
            from_ids.append(_say(lm, row, full_ids, len(target_ids), reasoning))
    return Transfer(
        target_id=row.target_id,
        seed=row.seed,
        method=row.method,
        model=lm.name,
        dtype=str(lm.dtype).removeprefix("torch."),
        was_exact=row.exact,
        was_lcs=row.lcs,
        exact=None if as_text else from_ids == wanted,
        lcs=None if as_text else _mean_lcs(wanted, from_ids),
        text_exact=from_text == wanted,
        text_lcs=_mean_lcs(wanted, from_text),
        output_text="\n".join(lm.decode(ids) for ids in (from_text if as_text else from_ids)),
    )


def _mean_lcs(wanted: Sequence[tuple[int, ...]], said: Sequence[tuple[int, ...]]) -> float:
    ratios = [lcs_ratio(*pair) for pair in zip(wanted, said, strict=True)]
    return sum(ratios) / len(ratios)


def _say(
    lm: FrozenLM,
    row: Inversion,
    prompt_ids: Sequence[int],
    length: int,
    reasoning: Reasoning | None,
) -> tuple[int, ...]:
    """The greedy decode of one prompt that must fit into the model's positions."""
    prompt_bos = bool(row.settings.get("prompt_bos", False))
    limit = lm.max_positions
    between = reasoning.max_tokens + len(lm.encode(reasoning.trigger)) if reasoning else 0
    if limit is not None and prompt_bos + len(prompt_ids) + between + length > limit:
        raise InputError(
            f"Expected row {row.target_id} to fit into the {limit} positions of {lm.name}, but "
            f"prompt and target have {len(prompt_ids)} and {length} tokens."
        )
    return say(lm, prompt_ids, length, prompt_bos, reasoning)


def transfer_table(rows: Sequence[Inversion], tried: Sequence[Transfer]) -> Table:
    """What the rows say, and below it each model and dtype where their prompts were tried.

    Exact counts the rows that were exact and still are; LCS is the honest mean over all rows.
    """
    table = Table(title=f"{len(rows)} prompts elsewhere, decoded one at a time")
    for heading in ("model", "dtype"):
        table.add_column(heading, overflow="fold")
    for heading in ("exact: ids", "exact: text", "LCS: ids", "LCS: text"):
        table.add_column(heading, justify="right")
    exact = [row for row in rows if row.exact]
    table.add_row(
        *_folded({row.model for row in rows}, {f"{row.dtype}, recorded" for row in rows}),
        f"{len(exact)} of {len(exact)}",
        f"{sum(row.round_trip_lcs == 1 for row in exact)} of {len(exact)}",
        _mean([row.lcs for row in rows]),
        _mean([row.round_trip_lcs for row in rows]),
        end_section=True,
    )
    for (model, dtype), group in _by_place(tried):
        were_exact = [t for t in group if t.was_exact]
        from_ids = [t.lcs for t in group if t.lcs is not None]
        still = f"{sum(t.exact is True for t in were_exact)} of {len(were_exact)}"
        table.add_row(
            *_folded({model}, {dtype}),
            still if from_ids else "-",
            f"{sum(t.text_exact for t in were_exact)} of {len(were_exact)}",
            _mean(from_ids),
            _mean([t.text_lcs for t in group]),
        )
    return table


def _variants(
    rows: Sequence[Inversion], lms: str | list[str] | None, dtypes: DType | list[DType] | None
) -> dict[tuple[str, DType], list[Inversion]]:
    """The rows by where they are tried, so that each model is loaded once."""
    found: dict[tuple[str, DType], list[Inversion]] = {}
    for lm, dtype, row in itertools.product(_as_list(lms), _as_list(dtypes), rows):
        wanted = dtype or row.dtype
        if wanted not in get_args(DType):
            raise InputError(
                f"Expected row {row.target_id} to name a dtype, but got {wanted!r}. Give one with "
                "`--dtype`."
            )
        found.setdefault((lm or row.model, cast(DType, wanted)), []).append(row)
    return found


def _by_place(tried: Sequence[Transfer]) -> Iterator[tuple[tuple[str, str], list[Transfer]]]:
    for place, group in itertools.groupby(tried, key=lambda t: (t.model, t.dtype)):
        yield place, list(group)


def _as_list(value: Any) -> list[Any]:
    """One value, or several, or None for that of each row."""
    return value if isinstance(value, list) and value else [value or None]


def _folded(*cells: set[str]) -> list[Text]:
    return [Text(visible(", ".join(sorted(cell)))) for cell in cells]


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"
