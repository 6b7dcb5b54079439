"""The context of a prompt: fixed tokens around blanks, and what the LM is to say after it.

The tokens of a prompt fill the blanks of its context, in order. A context without fixed tokens and
with one blank is the prompt alone. In a template a blank is written as `{slot}`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from dlmi.errors import InputError


@dataclass(frozen=True)
class Reasoning:
    """Text that the LM writes itself after a prompt, before the target."""

    max_tokens: Annotated[int, Meta(ge=1)]  # it may end earlier, with the end-of-sequence token
    trigger: str  # the text that is appended to it
    trigger_ids: tuple[int, ...]  # the same as token ids


@dataclass(frozen=True)
class Context:
    """Fixed tokens around one or more blanks."""

    # Fixed ids before the first blank, between blanks and after the last one
    pieces: tuple[tuple[int, ...], ...] = ((), ())
    # Tokens of each blank; blanks of length 0 share equally what the others leave
    blank_lengths: tuple[Annotated[int, Meta(ge=0)], ...] = (0,)
    start_ids: tuple[int, ...] = ()  # read before everything, but not part of the text: BoS or none
    # The first ids of `pieces[0]` that all contexts of a run, or of a search's window, have in
    # common: like `start_ids`, they are read once and their keys and values kept
    read_once: Annotated[int, Meta(ge=0)] = 0
    template: str | None = None  # the text that it was made from, if any
    chat: bool = False  # whether that was a chat message
    reasoning: Reasoning | None = None  # what the LM has yet to write; None once it is written

    def __post_init__(self) -> None:
        blanks = len(self.blank_lengths)
        if not 1 <= blanks == len(self.pieces) - 1 or self.read_once > len(self.pieces[0]):
            raise InputError(
                "Expected a context to have one piece more than blanks and `read_once` within its "
                f"first piece, but got {self.pieces}, {blanks} blanks and {self.read_once}."
            )

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The ids that are read once: the start, and the beginning that all contexts share."""
        return (*self.start_ids, *self.pieces[0][: self.read_once])

    @property
    def fixed_ids(self) -> tuple[int, ...]:
        """All fixed tokens of the text, as if the blanks were empty."""
        return tuple(token_id for piece in self.pieces for token_id in piece)

    @property
    def given_ids(self) -> tuple[int, ...]:
        """All ids that the LM does not write itself: the fixed tokens and the trigger."""
        return (*self.fixed_ids, *(self.reasoning.trigger_ids if self.reasoning else ()))

    @property
    def most_tokens(self) -> int:
        """Number of fixed tokens, with the longest possible reasoning."""
        return len(self.given_ids) + (self.reasoning.max_tokens if self.reasoning else 0)

    def sizes(self, length: int) -> tuple[int, ...]:
        """Tokens of each blank for a prompt of `length`; the first ones get one more if uneven.

        >>> Context(((1,), (), (2,), ()), (0, 3, 0)).sizes(8)
        (3, 3, 2)
        """
        left = length - sum(self.blank_lengths)
        shares = self.blank_lengths.count(0)
        if left < shares or (left and not shares):
            raise InputError(
                f"Expected the slots of `data.template` to hold `model.prompt_length` ({length}) "
                f"tokens, but their lengths are {list(self.blank_lengths)} (0: equal shares, at "
                "least 1). Change `model.prompt_length`, or leave a slot's length out (`{slot}`)."
            )
        equal = (left // shares + (i < left % shares) for i in range(shares))
        return tuple(blank_length or next(equal) for blank_length in self.blank_lengths)

    def positions(self, length: int) -> list[int]:
        """Positions of the prompt's tokens in the ids of the text."""
        positions: list[int] = []
        start = 0
        for piece, size in zip(self.pieces, self.sizes(length), strict=False):
            start += len(piece)
            positions += range(start, start + size)
            start += size
        return positions

    def text_ids(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids of the whole text: the prompt's tokens between the fixed ones.

        >>> Context(((1, 2), (3,))).text_ids([7, 8])
        (1, 2, 7, 8, 3)
        """
        ids = list(self.fixed_ids)
        for position, token_id in zip(self.positions(len(prompt_ids)), prompt_ids, strict=True):
            ids.insert(position, token_id)
        return tuple(ids)

    def ids(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """All ids that the LM reads: those of the text, after the start."""
        return (*self.start_ids, *self.text_ids(prompt_ids))

    def narrowed(self, prompt_ids: Sequence[int], count: int) -> "Context":
        """The context of the other tokens of a prompt whose first `count` tokens become fixed.

        Everything before the first of the other tokens is read once.

        >>> narrow = Context(((1,), (2,), (3,)), (2, 0)).narrowed([7, 8, 9], 1)
        >>> narrow.pieces, narrow.blank_lengths, narrow.read_once
        (((1, 7), (2,), (3,)), (1, 1), 2)
        """
        ids, positions = self.text_ids(prompt_ids), self.positions(len(prompt_ids))[count:]
        by_blank = itertools.groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0])
        blanks = [[position for _, position in pairs] for _, pairs in by_blank]
        ends = [0, *(blank[-1] + 1 for blank in blanks)]
        pieces = [ids[end : blank[0]] for end, blank in zip(ends, blanks, strict=False)]
        return replace(
            self,
            pieces=(*pieces, ids[ends[-1] :]),
            blank_lengths=tuple(map(len, blanks)),
            read_once=positions[0],
        )

    def after(self, reasoning_ids: Sequence[int]) -> "Context":
        """The context with the LM's reasoning and the trigger as fixed tokens at its end.

        >>> Context(((1,), (2,)), reasoning=Reasoning(9, "!", (5,))).after([3, 4]).pieces
        ((1,), (2, 3, 4, 5))
        """
        if self.reasoning is None:
            return self
        last = (*self.pieces[-1], *reasoning_ids, *self.reasoning.trigger_ids)
        return replace(self, pieces=(*self.pieces[:-1], last), reasoning=None)


NO_CONTEXT = Context()


def common_beginning(sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest beginning that all sequences share.

    >>> common_beginning([(1, 2, 3), (1, 2), (1, 2, 4)])
    (1, 2)
    """
    pairs = zip(min(sequences), max(sequences), strict=False)  # all others lie between these two
    return tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class Example:
    """A context, and what the LM is to say in it."""

    id: str
    ids: Annotated[tuple[int, ...], Meta(min_length=1)]  # the M token ids to be produced
    text: str  # their text
    context: Context = NO_CONTEXT  # fixed tokens around the prompt

    def after(self, reasoning_ids: Sequence[int]) -> "Example":
        """The example with the LM's reasoning in its context, if the context asks for some."""
        return replace(self, context=self.context.after(reasoning_ids))

    def tokens_read(self, prompt_length: int) -> int:
        """Tokens of a pass without the start and what is read once; the last is never read."""
        fixed = len(self.context.fixed_ids) - self.context.read_once
        return prompt_length + fixed + len(self.ids) - 1
