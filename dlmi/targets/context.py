"""The context of a prompt: fixed tokens, blanks for the prompt, and what the LM is to say after it.

A prompt of N tokens fills the blanks of a context, in order. A context without fixed tokens and
with one blank is the prompt alone. In a template the user writes a blank as `{slot}`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlmi.errors import InputError


@dataclass(frozen=True)
class Reasoning:
    """What the LM writes itself after a prompt, before what it is to say."""

    max_tokens: int  # tokens of it at most; it also ends with the end-of-sequence token
    trigger: str  # the text that is put behind it
    trigger_ids: tuple[int, ...]  # the same as token ids

    def __post_init__(self) -> None:
        """Refuse what cannot be written: files may hold anything."""
        if self.max_tokens < 1:
            raise InputError(
                "Expected the reasoning of a context to have at least 1 token, but got "
                f"{self.max_tokens}."
            )


@dataclass(frozen=True)
class Context:
    """Fixed tokens around one or more blanks."""

    # Fixed ids before the first blank, between blanks and after the last: one more than there are
    # blanks
    pieces: tuple[tuple[int, ...], ...] = ((), ())
    # Tokens of each blank; 0 is an equal share of what the others leave
    blank_lengths: tuple[int, ...] = (0,)
    # Read before everything, but no part of the text: BoS, or nothing
    start_ids: tuple[int, ...] = ()
    # How many of the first ids of `pieces[0]` all contexts of a run, or of a search's window, have
    # in common: their keys and values are computed once and kept. `start_ids` are kept in any case
    # and do not count here.
    read_once: int = 0
    template: str | None = None  # the text that it was made from, if any
    chat: bool = False  # whether that was a chat message
    # What the LM has still to write after all this; None once it is written
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        """Refuse what is no context: files may hold anything."""
        if (
            not self.blank_lengths
            or len(self.pieces) != len(self.blank_lengths) + 1
            or min(self.blank_lengths) < 0
            or not 0 <= self.read_once <= len(self.pieces[0])
        ):
            raise InputError(
                "Expected a context to have one piece more than blanks, with lengths of at least "
                f"0, and `read_once` within its first piece, but got {len(self.pieces)} pieces, "
                f"blanks of {list(self.blank_lengths)} tokens and `read_once` {self.read_once}."
            )

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What is read once: the start and the first ids that all contexts have in common."""
        return (*self.start_ids, *self.pieces[0][: self.read_once])

    @property
    def fixed_ids(self) -> tuple[int, ...]:
        """All fixed tokens of the text, as if the blanks were empty."""
        return tuple(token_id for piece in self.pieces for token_id in piece)

    @property
    def given_ids(self) -> tuple[int, ...]:
        """All ids that are not the LM's own: the fixed tokens and those of the trigger."""
        return (*self.fixed_ids, *(self.reasoning.trigger_ids if self.reasoning else ()))

    @property
    def most_tokens(self) -> int:
        """Fixed tokens, with as much reasoning as there may be."""
        return len(self.given_ids) + (self.reasoning.max_tokens if self.reasoning else 0)

    def sizes(self, length: int) -> tuple[int, ...]:
        """Tokens of each blank for a prompt of `length`; the first ones get one more if uneven.

        >>> Context(((1,), (), (2,), ()), (0, 3, 0)).sizes(8)
        (3, 3, 2)
        """
        left = length - sum(self.blank_lengths)
        shares = self.blank_lengths.count(0)
        if left < shares or (left and not shares):
            given = " + ".join(str(n) for n in self.blank_lengths if n) or "0"
            raise InputError(
                "Expected the slots of `data.template` to hold `model.prompt_length` "
                f"({length}) tokens together, but those with a length have {given}"
                f"{f' and {shares} more need at least 1 each' if shares else ''}. Change "
                "`model.prompt_length`, or leave a slot's length out (`{slot}`)."
            )
        sizes, equal = [], 0
        for blank_length in self.blank_lengths:
            sizes.append(blank_length or left // shares + (equal < left % shares))
            equal += blank_length == 0
        return tuple(sizes)

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
        prompt, ids = iter(prompt_ids), list(self.pieces[0])
        for piece, size in zip(self.pieces[1:], self.sizes(len(prompt_ids)), strict=True):
            ids += [next(prompt) for _ in range(size)]
            ids += piece
        return tuple(ids)

    def ids(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """All ids that the LM reads: those of the text, after the start.

        >>> Context(((1, 2), (3,)), start_ids=(0,)).ids([7, 8])
        (0, 1, 2, 7, 8, 3)
        """
        return (*self.start_ids, *self.text_ids(prompt_ids))

    def narrowed(self, prompt_ids: Sequence[int], count: int) -> "Context":
        """The context of the other tokens of a prompt, where the first `count` stay as they are.

        These become fixed tokens, read once with everything before the first token that is left.

        >>> narrow = Context(((1,), (2,), (3,)), (2, 0)).narrowed([7, 8, 9], 1)
        >>> narrow.pieces, narrow.blank_lengths, narrow.read_once
        (((1, 7), (2,), (3,)), (1, 1), 2)
        """
        ids = self.text_ids(prompt_ids)
        positions = self.positions(len(prompt_ids))[count:]
        pieces: list[tuple[int, ...]] = []
        lengths: list[int] = []
        end = 0  # of the ids that are in a piece or a blank already
        for position in positions:
            if lengths and position == end:
                lengths[-1] += 1
            else:
                pieces.append(ids[end:position])
                lengths.append(1)
            end = position + 1
        pieces.append(ids[end:])
        return replace(
            self, pieces=tuple(pieces), blank_lengths=tuple(lengths), read_once=positions[0]
        )

    def after(self, reasoning_ids: Sequence[int]) -> "Context":
        """The same with the reasoning that was wanted, and its trigger, as fixed tokens.

        >>> Context(((1,), (2,)), reasoning=Reasoning(9, "!", (5,))).after([3, 4]).pieces
        ((1,), (2, 3, 4, 5))
        """
        if self.reasoning is None:
            return self
        last = (*self.pieces[-1], *reasoning_ids, *self.reasoning.trigger_ids)
        return replace(self, pieces=(*self.pieces[:-1], last), reasoning=None)


NO_CONTEXT = Context()


def common_beginning(sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all of them start with.

    >>> common_beginning([(1, 2, 3), (1, 2), (1, 2, 4)])
    (1, 2)
    """
    first, last = min(sequences), max(sequences)  # all others lie between these two
    length = min(len(first), len(last))
    same = next((i for i in range(length) if first[i] != last[i]), length)
    return first[:same]


@dataclass(frozen=True)
class Example:
    """A context, and what the LM is to say in it."""

    id: str  # its name
    ids: tuple[int, ...]  # the M token ids to be produced
    text: str  # their text
    context: Context = NO_CONTEXT  # fixed tokens around the prompt

    def after(self, reasoning_ids: Sequence[int]) -> "Example":
        """The same with the LM's reasoning in its context, where it asks for some."""
        return replace(self, context=self.context.after(reasoning_ids))

    def tokens_read(self, prompt_length: int) -> int:
        """Tokens of one pass: the prompt, fixed tokens and all of the target but its last.

        Neither the start nor what is read once counts.
        """
        fixed = len(self.context.fixed_ids) - self.context.read_once
        return prompt_length + fixed + len(self.ids) - 1
