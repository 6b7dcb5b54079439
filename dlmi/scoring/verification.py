"""Decodes the prompts of result rows again, in the same model or in another.

In another dtype or model a prompt is tried as ids, which needs the same tokenizer, and as the text
that one would paste. With another tokenizer only the text can be tried; the target is then what
that tokenizer makes of the target's text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.metrics import lcs_ratio
from dlmi.rows import Inversion
from dlmi.scoring.evaluation import decode_text, evaluate_alone, mean_lcs, pasted_lcs
from dlmi.targets.context import NO_CONTEXT, Example
from dlmi.targets.target import Target, split, with_start_ids


@dataclass(frozen=True)
class Verified:
    """Whether a row holds."""

    problems: tuple[str, ...]  # what differs from the row, a line each
    exact: bool = False  # whether the ids of the prompt make the LM say the target
    text_exact: bool = False  # whether its pasted text does


@dataclass(frozen=True)
class Transfer:
    """How the prompt of one row does in one model and dtype."""

    target_id: str  # of the row
    seed: int  # of the row
    method: str  # of the row
    model: str  # where the prompt was tried
    dtype: str  # in which dtype
    was_exact: bool  # what the row says
    was_lcs: float  # what the row says
    exact: bool | None  # whether its ids make the model say the target; None if only text was tried
    lcs: float | None  # honest LCS ratio of its ids; None if only text was tried
    text_exact: bool  # whether its pasted text does
    text_lcs: float  # honest LCS ratio of its pasted text
    output_text: str  # what the model says after the ids, or after the text if only that was tried


def target_of(row: Inversion, bos_id: int) -> Target:
    """The target of a row, of any age, with BoS where the run had it before the prompt."""
    if row.examples:
        target = Target(row.target_id, row.examples, held_out=row.held_out)
    else:
        context = row.context or NO_CONTEXT
        target = Target.single(row.target_id, row.target_ids, row.target_text, context)
    start_ids = (bos_id,) if row.settings.get("prompt_bos") else ()
    return with_start_ids([target], start_ids)[0]


def verify_row(lm: FrozenLM, row: Inversion) -> Verified:
    """Decode a row's prompt again, alone, and compare with what the row says."""
    if not row.prompt_ids or not row.target_ids:
        return Verified(("prompt or target is empty",))
    target = target_of(row, lm.bos_id)
    everything = replace(target, examples=target.all_examples, held_out=())
    if not all(example.ids for example in everything.examples):
        return Verified(("the target of an example is empty",))
    given_ids = [i for example in everything.examples for i in example.context.given_ids]
    lm.check_ids([*row.prompt_ids, *row.target_ids, *everything.ids, *given_ids], _name(row))
    length = everything.longest_row(len(row.prompt_ids))
    if lm.max_positions is not None and length > lm.max_positions:
        return Verified((f"{length} tokens are more than {lm.name} has positions",))
    now = evaluate_alone(lm, row.prompt_ids, everything, row.best_step)
    output_ids = now.output_ids[: len(target.ids)]
    text_lcs = pasted_lcs(lm, now, target)
    is_exact = output_ids == row.target_ids
    recorded_and_now: dict[str, tuple[Any, Any]] = {
        "output_ids": (row.output_ids, output_ids),
        "lcs": (row.lcs, mean_lcs(target.measured, output_ids)),
        "exact": (row.exact, is_exact),
        "prompt_text": (row.prompt_text, lm.decode(row.prompt_ids)),
        "round_trip_lcs": (row.round_trip_lcs, text_lcs),
    }
    if row.context is not None:
        full_ids = target.examples[0].context.text_ids(row.prompt_ids)
        recorded_and_now["full_ids"] = row.full_ids, full_ids
        recorded_and_now["full_text"] = row.full_text, lm.decode(full_ids)
    written = now.reasoning_ids or ((),) * len(everything.examples)
    outputs = split(everything.examples, now.output_ids)
    for recorded, example, said_ids, reasoning_ids in zip(
        (*row.examples, *row.held_out), everything.examples, outputs, written, strict=False
    ):
        full_text = lm.decode(example.context.text_ids(row.prompt_ids))
        recorded_and_now[f"example {recorded.id}"] = (
            (recorded.full_text, recorded.reasoning_ids, recorded.output_ids, recorded.exact),
            (full_text, reasoning_ids, said_ids, said_ids == example.ids),
        )
    problems = (
        f"{name} is recorded as {recorded!r} but is {value!r}"
        for name, (recorded, value) in recorded_and_now.items()
        if recorded != value
    )
    return Verified(tuple(problems), is_exact, text_lcs == 1)


@torch.no_grad()
def try_row(lm: FrozenLM, row: Inversion, as_text: bool = False) -> Transfer:
    """Decode a row's prompt in a model, from its ids and from its text.

    With `as_text`, for another tokenizer, only from its text; so is the target.
    """
    target = target_of(row, lm.bos_id)
    texts = [example.full_text for example in row.examples]
    texts = texts or [row.full_text or row.prompt_text]
    wanted: list[tuple[int, ...]] = []
    from_text: list[tuple[int, ...]] = []
    from_ids: list[tuple[int, ...]] = []
    for example, text in zip(target.examples, texts, strict=True):
        target_ids = tuple(lm.encode(example.text)) if as_text else example.ids
        if not target_ids or not row.prompt_ids:
            raise InputError(f"Expected {_name(row)} to have a prompt and a target of tokens.")
        wanted.append(target_ids)
        from_text.append(_say(lm, row, example, lm.encode(text), len(target_ids)))
        if not as_text:
            ids = example.context.text_ids(row.prompt_ids)
            lm.check_ids([*ids, *target_ids], _name(row))
            from_ids.append(_say(lm, row, example, ids, len(target_ids)))
    return Transfer(
        target_id=row.target_id,
        seed=row.seed,
        method=row.method,
        model=lm.name,
        dtype=str(lm.dtype).removeprefix("torch."),
        was_exact=row.exact,
        was_lcs=row.lcs,
        exact=None if as_text else from_ids == wanted,
        lcs=None if as_text else sum(map(lcs_ratio, wanted, from_ids)) / len(wanted),
        text_exact=from_text == wanted,
        text_lcs=sum(map(lcs_ratio, wanted, from_text)) / len(wanted),
        output_text="\n".join(lm.decode(ids) for ids in (from_text if as_text else from_ids)),
    )


def _say(
    lm: FrozenLM, row: Inversion, example: Example, text_ids: Sequence[int], length: int
) -> tuple[int, ...]:
    """The greedy decode of one whole prompt that must fit into the model's positions."""
    reasoning, limit = example.context.reasoning, lm.max_positions
    between = reasoning.max_tokens + len(lm.encode(reasoning.trigger)) if reasoning else 0
    whole = len(example.context.start_ids) + len(text_ids) + between + length
    if limit is not None and whole > limit:
        raise InputError(
            f"Expected {_name(row)} to fit into the {limit} positions of {lm.name}, but prompt and "
            f"target have {len(text_ids)} and {length} tokens."
        )
    return decode_text(lm, example.context, text_ids, length)


def _name(row: Inversion) -> str:
    return f"row {row.target_id}"
