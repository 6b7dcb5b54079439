"""How prompts and their contexts are laid out as the rows of a pass.

A row is one prompt in one example: the tokens that the LM reads after a prefix whose keys and
values are kept, up to the last but one of the target. The tokens of all rows are concatenated, so
rows may have any lengths. Alike rows (same prefix, same length) can run as a plain batch, all rows
together as one packed pass.

Axes: R rows, L tokens of all rows, m target tokens of all rows, C prompts, N tokens of a prompt, d
width.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.packed import PackedLayout, PackedRow
from dlmi.lm.prefix import Prefix
from dlmi.lm.transfer import Arrived, Parcel
from dlmi.scoring.prefixes import Ids, PrefixStore
from dlmi.targets.context import Example


@dataclass(frozen=True)
class Row:
    """What the LM reads of one prompt in one example."""

    size: int  # tokens of the prompt, N
    example: Example  # the context, and what is to be said
    prefix_ids: tuple[int, ...] = ()  # a prefix that is kept and starts with the same tokens
    start: int = 0  # how many first tokens are taken from it, not read again

    @property
    def length(self) -> int:
        """Tokens that are read."""
        context = self.example.context
        whole = len(context.start_ids) + len(context.fixed_ids) + self.size
        return whole - self.start + self.keep - 1

    @property
    def keep(self) -> int:
        """Target tokens: so many last positions need logits."""
        return len(self.example.ids)

    @property
    def kind(self) -> tuple[int, int, tuple[int, ...]]:
        """What the rows of a plain batch have in common."""
        return self.length, self.keep, self.prefix_ids[: self.start]


def plain_rows(size: int, examples: Iterable[Example], can_share: bool) -> tuple[Row, ...]:
    """A prompt of N tokens in its examples, after the prefixes of their contexts."""
    kept = [(e, e.context.prefix_ids if can_share else ()) for e in examples]
    return tuple(Row(size, example, ids, len(ids)) for example, ids in kept)


def prompt_places(example: Example, size: int) -> list[int]:
    """Where the tokens of a prompt stand among all of its row, (N,)."""
    before = len(example.context.start_ids)
    return [before + position for position in example.context.positions(size)]


@dataclass(frozen=True)
class Places:
    """What the device needs of a batch."""

    tokens: Tensor  # where each token is among those of prompts and the fixed ones, (L,)
    fixed_ids: Tensor  # the fixed tokens, each once
    target_ids: Tensor  # of all rows, (m,)
    row_of_target: Tensor  # the row of each target token, (m,)
    row_of_token: Tensor  # the row of each token, (L,)
    given_rows: Tensor  # where each given row is now, (R,)
    given_targets: Tensor  # where its target tokens are now, (m,)
    owners: Tensor  # the prompt of each row, (R,)
    prompt_ends: Tensor  # the token after each row's prompt, where that is read whole, (R,)


class Batch:
    """Rows in the order of a pass: alike rows side by side, the shortest first.

    Args:
        prompts: The rows of each prompt.
        device: Where they are read.

    Attributes:
        order: Where each row was among the given rows of all prompts.
        rows, owners: The rows, and the prompt of each.
        groups: Slices of alike rows.
        starts, target_starts: Where the tokens, or targets, of each row begin, and the end of all.
        on_host: `on_device`, on the CPU.
    """

    def __init__(self, prompts: Sequence[Sequence[Row]], device: torch.device) -> None:
        self.device = device
        given = [(row, owner) for owner, own in enumerate(prompts) for row in own]
        self.order = sorted(range(len(given)), key=lambda i: given[i][0].kind)
        self.rows = [given[i][0] for i in self.order]
        self.owners = [given[i][1] for i in self.order]
        counts = [len(list(own)) for _, own in itertools.groupby(self.rows, lambda row: row.kind)]
        ends = itertools.accumulate(counts)
        self.groups = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        self.starts = [0, *itertools.accumulate(row.length for row in self.rows)]
        self.target_starts = [0, *itertools.accumulate(row.keep for row in self.rows)]
        prompt_ends = list(itertools.accumulate(own[0].size for own in prompts))
        fixed: dict[int, int] = {}  # where the embedding of each fixed token is, after all prompts
        templates: dict[tuple[Example, int], list[int]] = {}
        for row in self.rows:
            if (row.example, row.size) not in templates:
                templates[row.example, row.size] = [
                    i if i < 0 else fixed.setdefault(i, prompt_ends[-1] + len(fixed))
                    for i in _template(row.example, row.size)
                ]
        index: list[int] = []  # of each token among those of the prompts and the fixed ones
        for row, owner in zip(self.rows, self.owners, strict=True):
            end = prompt_ends[owner]
            template = templates[row.example, row.size][row.start :]
            index += [place if place >= 0 else end + place for place in template]
        places = sorted(range(len(given)), key=self.order.__getitem__)
        spans = [range(self.target_starts[p], self.target_starts[p + 1]) for p in places]
        parts = [
            index,
            list(fixed),
            [token_id for row in self.rows for token_id in row.example.ids],
            [i for i, row in enumerate(self.rows) for _ in row.example.ids],
            [i for i, row in enumerate(self.rows) for _ in range(row.length)],
            places,
            list(itertools.chain.from_iterable(spans)),
            self.owners,
            [end - row.keep + 1 for row, end in zip(self.rows, self.starts[1:], strict=True)],
        ]
        self.on_host = Places(*(torch.tensor(part, dtype=torch.long) for part in parts))
        self._arrived: Arrived | None = None
        self._layouts: dict[tuple[int, int], PackedLayout] = {}

    def send(self, parcel: Parcel) -> None:
        """Let a parcel take it to the device, once."""
        if self._arrived is None:
            self._arrived = parcel.add(*vars(self.on_host).values())

    @functools.cached_property
    def on_device(self) -> Places:
        """What the device needs of it."""
        self.send(Parcel(self.device))
        assert self._arrived is not None
        return Places(*self._arrived())

    def gather(self, lm: FrozenLM, prompt_embeds: Tensor) -> Tensor:
        """What the LM reads, (L, d), from the tokens of all prompts, (C * N, d).

        Where these are wider than embeddings, fixed tokens have zeros there.
        """
        fixed = lm.embed(self.on_device.fixed_ids).to(prompt_embeds.dtype)
        fixed = F.pad(fixed, (0, prompt_embeds.shape[1] - fixed.shape[1]))
        return torch.cat([prompt_embeds, fixed]).index_select(0, self.on_device.tokens)

    def tokens(self, rows: slice) -> slice:
        """Where the tokens of some rows are."""
        return slice(self.starts[rows.start], self.starts[rows.stop])

    def targets(self, rows: slice) -> slice:
        """Where their target tokens are."""
        return slice(self.target_starts[rows.start], self.target_starts[rows.stop])

    def prefix(self, rows: slice, store: PrefixStore) -> Prefix | None:
        """The prefix of alike rows."""
        row = self.rows[rows.start]
        return store.read([row.prefix_ids])[0].shortened(row.start) if row.start else None

    def prefixes(self, rows: slice, store: PrefixStore) -> list[Prefix]:
        """The prefixes of the rows of a packed pass."""
        return store.read(self._prefix_ids(rows))

    def layout(self, rows: slice, parcel: Parcel | None = None) -> PackedLayout:
        """How rows lie in a packed pass; a parcel takes it to the device, if it is new."""
        if (rows.start, rows.stop) not in self._layouts:
            numbers = {ids: i for i, ids in enumerate(self._prefix_ids(rows))}
            packed = [
                PackedRow(row.length, row.keep, numbers.get(row.prefix_ids, 0), row.start)
                for row in self.rows[rows]
            ]
            made = PackedLayout(packed, parcel or Parcel(self.device))
            self._layouts[rows.start, rows.stop] = made
        return self._layouts[rows.start, rows.stop]

    def _prefix_ids(self, rows: slice) -> list[Ids]:
        return list(dict.fromkeys(row.prefix_ids for row in self.rows[rows] if row.start))

    def run(
        self,
        lm: FrozenLM,
        work: Callable[[slice], None],
        wants_gradient: bool = False,
        is_packed: bool = False,
    ) -> None:
        """Call `work` on slices of alike rows, or of any rows if packed, as memory allows."""
        for span in [slice(0, len(self.rows))] if is_packed else self.groups:

            def part(cut: slice, first: int = span.start) -> None:
                work(slice(first + cut.start, first + cut.stop))

            size = self._size(span)
            lm.rows_per_pass.run(lm, *size, part, wants_gradient, is_packed)

    def lay_out_packed(self, lm: FrozenLM, wants_gradient: bool, parcel: Parcel) -> None:
        """Make the layouts that a packed run will need, as far as memory can be foreseen."""
        size = self._size(slice(0, len(self.rows)))
        for cut in lm.rows_per_pass.slices(lm, *size, wants_gradient, is_packed=True):
            self.layout(cut, parcel)

    def _size(self, span: slice) -> tuple[int, int, int]:
        """How many rows there are, and the tokens and targets of a row, on average."""
        rows = span.stop - span.start
        tokens, targets = self.tokens(span), self.targets(span)
        return rows, *(-(-(own.stop - own.start) // rows) for own in (tokens, targets))


lay_out = functools.lru_cache(maxsize=16)(Batch)  # slots use the same rows for many steps


def _template(example: Example, size: int) -> list[int]:
    """The ids of a whole row; in place of the prompt's, -N to -1."""
    if example.context.reasoning is not None:
        raise RuntimeError("The reasoning of this example has not been written yet.")
    return [*example.context.ids(range(-size, 0)), *example.ids[:-1]]
