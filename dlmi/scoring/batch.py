"""How prompts and their contexts lie in the rows of a pass.

A row is one prompt in one example: the tokens that the LM reads behind a beginning whose keys and
values are kept, up to the last but one of the target. The tokens of all rows lie one after the
other, so rows may be of any lengths. Those that are alike (same beginning, same length) can run as
a plain batch, all together as one packed pass.

Axes: R rows, L tokens of all rows, m target tokens of all rows, C prompts, N tokens of a prompt, M
target tokens of a row, d width.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.packed import PackedRow
from dlmi.lm.prefix import Prefix
from dlmi.scoring.prefixes import PrefixStore
from dlmi.targets.context import Example


@dataclass(frozen=True)
class Row:
    """What the LM reads of one prompt in one example."""

    prompt: int  # which prompt
    first: int  # where its first token lies among the tokens of all prompts
    size: int  # its tokens, N
    example: Example  # the context, and what is to be said
    # What is kept of the beginning, or of one that starts in the same way
    prefix_ids: tuple[int, ...] = ()
    start: int = 0  # how many of its first tokens are known from there and not read again

    @property
    def length(self) -> int:
        """Tokens that are read."""
        context = self.example.context
        whole = len(context.start_ids) + len(context.fixed_ids) + self.size
        return whole - self.start + len(self.example.ids) - 1

    @property
    def kind(self) -> tuple[int, int, tuple[int, ...]]:
        """What the rows of a plain batch have in common."""
        return self.length, len(self.example.ids), self.prefix_ids[: self.start]


def rows_of_prompt(
    prompt: int, size: int, examples: Iterable[Example], can_share: bool
) -> list[Row]:
    """One of many prompts of N tokens in its examples, behind what is kept of their beginnings."""
    kept = [example.context.prefix_ids if can_share else () for example in examples]
    pairs = zip(examples, kept, strict=True)
    return [Row(prompt, prompt * size, size, e, ids, len(ids)) for e, ids in pairs]


@functools.lru_cache(maxsize=16)
def lay_out(rows: tuple[Row, ...], device: torch.device) -> "Batch":
    """The batch of these rows; slots use theirs for many steps."""
    return Batch(rows, device)


class Batch:
    """Rows, laid out with alike rows side by side, the shortest first.

    Args:
        rows: What is read.
        device: Where the tensors are made, in one copy.

    Attributes:
        rows: In the order in which they lie.
        groups: Those that are alike.
        starts: Where the tokens of each row begin, and the end of all.
        target_starts: The same of their target tokens.
        target_ids: Of all rows, (m,).
        row_of_target: Which row each of these belongs to, (m,).
        row_of_token: Which row each token belongs to, (L,).
        places: Where each of the given rows lies, (R,).
        target_places: Where the target tokens of the given rows lie, in their order, (m,).
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        order = sorted(range(len(rows)), key=lambda i: rows[i].kind)
        self.rows = [rows[i] for i in order]
        self.groups: list[slice] = []
        for _, members in itertools.groupby(range(len(order)), lambda i: self.rows[i].kind):
            first, *others = members
            self.groups.append(slice(first, first + len(others) + 1))
        self.starts = [0, *itertools.accumulate(row.length for row in self.rows)]
        self.target_starts = [0, *itertools.accumulate(len(row.example.ids) for row in self.rows)]
        fixed_ids: list[int] = []
        templates: dict[Example, tuple[list[int], int]] = {}
        for row in self.rows:
            if row.example not in templates:
                templates[row.example] = _template(row.example, row.size), len(fixed_ids)
                fixed_ids += _fixed_ids(row.example)
        index: list[int] = []  # of each token among the fixed ones and those of the prompts
        for row in self.rows:
            template, offset = templates[row.example]
            first = len(fixed_ids) + row.first
            index += [first + t if t >= 0 else offset - 1 - t for t in template[row.start :]]
        places = sorted(range(len(order)), key=order.__getitem__)
        spans = [range(self.target_starts[p], self.target_starts[p + 1]) for p in places]
        parts = [
            index,
            fixed_ids,
            [token_id for row in self.rows for token_id in row.example.ids],
            [i for i, row in enumerate(self.rows) for _ in row.example.ids],
            [i for i, row in enumerate(self.rows) for _ in range(row.length)],
            places,
            list(itertools.chain.from_iterable(spans)),
        ]
        everything = torch.tensor(list(itertools.chain.from_iterable(parts))).to(device)
        self._index, self._fixed_ids, *tensors = torch.split(
            everything, [len(part) for part in parts]
        )
        self.target_ids, self.row_of_target, self.row_of_token, *back = tensors
        self.places, self.target_places = back

    def gather(self, lm: FrozenLM, prompt_embeds: Tensor) -> Tensor:
        """What the LM reads, (L, d), from the tokens of all prompts, (C * N, d)."""
        fixed_embeds = lm.embed(self._fixed_ids).to(prompt_embeds.dtype)
        return torch.cat([fixed_embeds, prompt_embeds]).index_select(0, self._index)

    def tokens(self, rows: slice) -> slice:
        """Where the tokens of some rows lie."""
        return slice(self.starts[rows.start], self.starts[rows.stop])

    def targets(self, rows: slice) -> slice:
        """Where their target tokens lie."""
        return slice(self.target_starts[rows.start], self.target_starts[rows.stop])

    def prefix(self, rows: slice, store: PrefixStore) -> Prefix | None:
        """What rows that are alike stand behind."""
        row = self.rows[rows.start]
        return store.read([row.prefix_ids])[0].shortened(row.start) if row.start else None

    def packed(self, rows: slice, store: PrefixStore) -> tuple[list[PackedRow], list[Prefix]]:
        """How rows lie in a packed pass, and the prefixes that they stand behind."""
        members = self.rows[rows]
        numbers = {row.prefix_ids: 0 for row in members if row.start}
        numbers = {ids: i for i, ids in enumerate(numbers)}
        laid_out = [
            PackedRow(r.length, len(r.example.ids), numbers.get(r.prefix_ids, 0), r.start)
            for r in members
        ]
        return laid_out, store.read(list(numbers))


def _fixed_ids(example: Example) -> list[int]:
    """The fixed tokens of an example: around the prompt, then those of the target but the last."""
    context = example.context
    return [*context.start_ids, *context.fixed_ids, *example.ids[:-1]]


def _template(example: Example, size: int) -> list[int]:
    """Of each token of a whole row: its place in the prompt, or -1 less that among fixed ones."""
    context = example.context
    if context.reasoning is not None:
        raise RuntimeError("The reasoning of this example has not been written yet.")
    before = len(context.start_ids)
    of_prompt = {before + p: t for t, p in enumerate(context.positions(size))}
    fixed = itertools.count(1)
    whole = size + len(_fixed_ids(example))
    return [of_prompt[i] if i in of_prompt else -next(fixed) for i in range(whole)]
