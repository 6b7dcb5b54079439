"""A target: what one prompt is to make the LM say, in one context or in many."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta

from dlmi.jsonl import build
from dlmi.old_rows import EXAMPLES, each, with_context
from dlmi.targets.context import NO_CONTEXT, Context, Example, common_beginning
from dlmi.targets.seeds import hash_seed

SHARED_ID = "shared"

_AtLeastOne = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Target:
    """One example, or many that share one prompt."""

    id: str  # unique within a run; also seeds the noise of its inversion
    examples: Annotated[tuple[Example, ...], Meta(min_length=1)]  # what steps learn from
    k: int | None = None  # difficulty: the mean rank it was generated with
    ranks: tuple[int, ...] | None = None  # drawn for each token by Algorithm 2, up to EoS
    # What the LM gives each of those tokens after BoS and the tokens before it
    probabilities: tuple[float, ...] | None = None
    perplexity: float | None = None  # of those tokens after BoS
    per_step: _AtLeastOne | None = None  # of a shared prompt: how many examples each step reads
    evaluated: _AtLeastOne | None = None  # how many examples, the first ones, an evaluation reads
    held_out: tuple[Example, ...] = ()  # examples that only the final prompt is tried on
    group: str | None = None  # when one target of a group is solved, the others are stopped

    @classmethod
    def single(
        cls, id: str, ids: Sequence[int], text: str, context: Context = NO_CONTEXT, **fields: Any
    ) -> "Target":
        """A target of one example with the same id; `fields` are `k`, `ranks` and others."""
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
        """Whether the LM writes reasoning of its own before the target."""
        return any(example.context.reasoning is not None for example in self.all_examples)

    def longest_row(self, prompt_length: int) -> int:
        """Tokens of the start, context, prompt and target, where that is longest."""
        return prompt_length + max(
            len(e.context.start_ids) + e.context.most_tokens + len(e.ids) for e in self.all_examples
        )

    def minibatch(self, step: int, key: int) -> tuple[Example, ...]:
        """The examples that a step reads; `key` seeds the order of each round through all."""
        if self.per_step is None:
            return self.examples
        size = len(self.examples)
        count = min(self.per_step, size)
        turns = [divmod(step * count + i, size) for i in range(count)]
        orders = {}
        for number in {number for number, _ in turns}:
            rng = torch.Generator().manual_seed(hash_seed(f"{key}/round {number} of examples"))
            orders[number] = torch.randperm(size, generator=rng).tolist()
        return tuple(self.examples[orders[number][place]] for number, place in turns)

    def with_contexts(self, change: Callable[[Context], Context]) -> "Target":
        """The same target with every context changed."""

        def changed(examples: Sequence[Example]) -> tuple[Example, ...]:
            return tuple(dataclasses.replace(e, context=change(e.context)) for e in examples)

        return dataclasses.replace(
            self, examples=changed(self.examples), held_out=changed(self.held_out)
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; that of a single example has its `ids`, `text` and `context`."""
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
        """The inverse of `to_json`; raises `InputError` where a value has the wrong type."""
        return build(cls, _with_examples(row))


def _with_examples(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the fields of `Target`; older versions wrote `frame` and `shared`."""
    shared = row.get("shared")
    if isinstance(shared, dict):  # here `examples` are those that are evaluated
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
    """Concatenated outputs split into one tuple for each example."""
    ids = iter(output_ids)
    return [tuple(itertools.islice(ids, len(example.ids))) for example in examples]


def share_prompt(
    targets: Sequence[Target],
    per_step: int,
    evaluated: int | None = None,
    held_out: Sequence[Target] = (),
) -> Target:
    """One target whose prompt is to work for the examples of many; see `Target`."""
    return Target(
        SHARED_ID,
        tuple(example for target in targets for example in target.examples),
        per_step=per_step,
        evaluated=evaluated,
        held_out=tuple(example for target in held_out for example in target.examples),
    )


def with_start_ids(targets: Sequence[Target], start_ids: Sequence[int]) -> list[Target]:
    """The targets with `start_ids` (BoS, or none) in every context."""
    start = tuple(start_ids)
    return [t.with_contexts(lambda c: dataclasses.replace(c, start_ids=start)) for t in targets]


def share_prefix(targets: Sequence[Target]) -> list[Target]:
    """The targets of a run, with the beginning that all contexts share marked `read_once`."""
    firsts = [example.context.pieces[0] for target in targets for example in target.all_examples]
    count = len(common_beginning(firsts))
    return [t.with_contexts(lambda c: dataclasses.replace(c, read_once=count)) for t in targets]


def fingerprint_targets(targets: Iterable[Target]) -> str:
    """A short hash over the ids, tokens and contexts of the targets."""
    lines, of_shared = [], []
    for target in targets:
        lines.append(":".join([target.id, *map(_content, target.all_examples)]))
        if target.is_shared:
            counts = f"{len(target.measured)} of {len(target.examples)}"
            of_shared.append(f"{counts}, {target.per_step} a step")
    return hashlib.sha256("\n".join(lines + of_shared).encode()).hexdigest()[:16]


def _content(example: Example) -> str:
    context = example.context
    around = (context.pieces, context.blank_lengths)
    is_alone = around == (NO_CONTEXT.pieces, NO_CONTEXT.blank_lengths)
    return f"{example.ids}{'' if is_alone else around}{context.reasoning or ''}"
