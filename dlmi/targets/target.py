"""A target: what one prompt is to make the LM say, in one context or in many."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlmi.errors import InputError
from dlmi.jsonl import build
from dlmi.old_rows import EXAMPLES, each, with_context
from dlmi.targets.context import NO_CONTEXT, Context, Example, common_beginning
from dlmi.targets.seeds import hash_seed

SHARED_ID = "shared"


@dataclass(frozen=True)
class Target:
    """One example, or many that share one prompt."""

    id: str  # unique within a run; also seeds the noise of its inversion
    examples: tuple[Example, ...]  # what steps learn from; at least one
    k: int | None = None  # difficulty: the mean rank it was generated with, or None
    # The rank drawn for each token by Algorithm 2; tokens padded after EoS have none
    ranks: tuple[int, ...] | None = None
    # What the LM gives each of those tokens after BoS and the ones before it
    probabilities: tuple[float, ...] | None = None
    perplexity: float | None = None  # of those tokens after BoS
    # Of a shared prompt, how many of the examples each step reads; else None
    per_step: int | None = None
    # How many of them, the first ones, an evaluation reads; None for all
    evaluated: int | None = None
    held_out: tuple[Example, ...] = ()  # examples that only the final prompt is tried on
    # Targets of one group are tries at one task: when one is solved, the others leave
    group: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no target: files may hold anything."""
        for name, count in (
            ("examples", len(self.examples)),
            ("per_step", self.per_step),
            ("evaluated", self.evaluated),
        ):
            if count is not None and count < 1:
                raise InputError(f"Expected `{name}` of a target to be at least 1, but got {count}")

    @classmethod
    def single(
        cls, id: str, ids: Sequence[int], text: str, context: Context = NO_CONTEXT, **fields: Any
    ) -> "Target":
        """A target of one example, which has its name; `fields` are `k`, `ranks` and others."""
        return cls(id, (Example(id, tuple(ids), text, context),), **fields)

    @functools.cached_property
    def measured(self) -> tuple[Example, ...]:
        """The examples that an evaluation reads."""
        return self.examples[: self.evaluated]

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """The token ids of all measured examples, concatenated."""
        return tuple(token_id for example in self.measured for token_id in example.ids)

    @functools.cached_property
    def text(self) -> str:
        """Their texts, a line each."""
        return "\n".join(example.text for example in self.measured)

    @property
    def is_shared(self) -> bool:
        """Whether its prompt is for many examples, of which each step reads a few."""
        return self.per_step is not None

    @property
    def all_examples(self) -> tuple[Example, ...]:
        """The examples, and those that are held out."""
        return self.examples + self.held_out

    @functools.cached_property
    def reasons(self) -> bool:
        """Whether the LM writes reasoning of its own before it is to say anything."""
        return any(example.context.reasoning is not None for example in self.all_examples)

    @functools.cached_property
    def ids_to_say(self) -> tuple[int, ...]:
        """All token ids that steps teach the LM to say."""
        return tuple(token_id for example in self.examples for token_id in example.ids)

    def longest_row(self, prompt_length: int) -> int:
        """Tokens of the start, context, prompt and target, where that is longest."""
        return prompt_length + max(
            len(e.context.start_ids) + e.context.most_tokens + len(e.ids) for e in self.all_examples
        )

    def minibatch(self, step: int, key: int) -> tuple[Example, ...]:
        """The examples that a step reads: `per_step` of those that share the prompt.

        They depend on the number of steps before it and on the key (the seed of the target's own
        noise) alone. All examples have their turn before any has its next, each round in an order
        of its own.
        """
        if self.per_step is None:
            return self.examples
        size = len(self.examples)
        count = min(self.per_step, size)
        turns = [divmod(step * count + i, size) for i in range(count)]
        orders = {number: _order_of_round(number, size, key) for number, _ in turns}
        return tuple(self.examples[orders[number][place]] for number, place in turns)

    def with_contexts(self, change: Callable[[Context], Context]) -> "Target":
        """The same target with every context changed."""

        def changed(examples: Sequence[Example]) -> tuple[Example, ...]:
            return tuple(dataclasses.replace(e, context=change(e.context)) for e in examples)

        return dataclasses.replace(
            self, examples=changed(self.examples), held_out=changed(self.held_out)
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; `from_json` gives the same target back.

        A target of one example is laid out flat: its `ids`, `text` and, if it has one, `context`.
        """
        row = dataclasses.asdict(self)
        [first, *others] = row.pop("examples")
        rest = {name: row.pop(name) for name in ("per_step", "evaluated", "held_out", "group")}
        rest = {name: value for name, value in rest.items() if value not in (None, ())}
        if others or first["id"] != self.id or not rest.keys() <= {"group"}:
            return {**row, "examples": [first, *others], **rest}
        context = {} if self.examples[0].context == NO_CONTEXT else {"context": first["context"]}
        return {"id": self.id, "ids": first["ids"], "text": first["text"], **row, **context, **rest}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Target":
        """The inverse of `to_json`; `InputError` where a value is of another type."""
        return build(cls, _with_examples(row))


def _order_of_round(number: int, size: int, key: int) -> list[int]:
    seed = hash_seed(f"{key}/round {number} of examples")
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def _with_examples(row: dict[str, Any]) -> dict[str, Any]:
    """A row as `Target` has its fields; also rows of versions that said `frame` and `shared`."""
    shared = row.get("shared")
    if isinstance(shared, dict):  # `examples` were those that are evaluated
        seen, pool = row.get("examples") or [], shared.get("pool") or []
        row = {**row, **shared, "examples": pool, "evaluated": len(seen) or None}
    elif "examples" not in row:
        names = ["id", "ids", "text", "frame"]
        example = {name: row[name] for name in names if name in row}
        if not isinstance(row.get("context"), str | None):  # a text is a field of a template
            example["context"] = row["context"]
        row = {**row, "examples": [example]}
    lists = {name: each(with_context, row[name]) for name in EXAMPLES if name in row}
    return {**row, **lists}


def split(examples: Sequence[Example], output_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Concatenated outputs apart again, one tuple for each example."""
    parts, start = [], 0
    for example in examples:
        parts.append(tuple(output_ids[start : start + len(example.ids)]))
        start += len(example.ids)
    return parts


def share_prompt(
    targets: Sequence[Target],
    per_step: int,
    evaluated: int | None = None,
    held_out: Sequence[Target] = (),
) -> Target:
    """One target of many: a prompt is learned that is to work for all of them; see `Target`."""
    return Target(
        SHARED_ID,
        tuple(example for target in targets for example in target.examples),
        per_step=per_step,
        evaluated=evaluated,
        held_out=tuple(example for target in held_out for example in target.examples),
    )


def with_start_ids(targets: Sequence[Target], start_ids: Sequence[int]) -> list[Target]:
    """The targets with ids (BoS, or none) that are read before everything."""
    start = tuple(start_ids)
    return [t.with_contexts(lambda c: dataclasses.replace(c, start_ids=start)) for t in targets]


def share_prefix(targets: Sequence[Target]) -> list[Target]:
    """The targets of a run, with what all their contexts begin with marked to be read once."""
    firsts = [example.context.pieces[0] for target in targets for example in target.all_examples]
    count = len(common_beginning(firsts))
    return [t.with_contexts(lambda c: dataclasses.replace(c, read_once=count)) for t in targets]


def fingerprint_targets(targets: Iterable[Target]) -> str:
    """A short hash over the ids of the targets, their tokens and contexts: tells sets apart."""
    targets = list(targets)
    lines = [
        ":".join([target.id, *(_content(example) for example in target.all_examples)])
        for target in targets
    ]
    lines += [
        f"{len(target.measured)} of {len(target.examples)}, {target.per_step} a step"
        for target in targets
        if target.is_shared
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _content(example: Example) -> str:
    context = example.context
    around = (context.pieces, context.blank_lengths)
    is_alone = around == (NO_CONTEXT.pieces, NO_CONTEXT.blank_lengths)
    reasoning = "" if context.reasoning is None else str(context.reasoning)
    return f"{example.ids}{'' if is_alone else around}{reasoning}"
