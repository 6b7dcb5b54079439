"""What stands around the learned tokens: fixed tokens, and what the LM is to say after them.

A prompt of N learned tokens fills the slots of a frame, in order. A frame without fixed tokens and
with one slot is the prompt alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlmi.errors import InputError


@dataclass(frozen=True)
class Reasoning:
    """What the LM writes itself after a prompt, before what it is to say.

    Attributes:
        max_tokens: Tokens of it at most; it also ends with the end-of-sequence token.
        trigger: The text that is put behind it.
        trigger_ids: The same as token ids.
    """

    max_tokens: int
    trigger: str
    trigger_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be written: files may hold anything."""
        if self.max_tokens < 1:
            raise InputError(
                "Expected the reasoning of a frame to have at least 1 token, but got "
                f"{self.max_tokens}."
            )


@dataclass(frozen=True)
class Frame:
    """Fixed tokens around one or more slots.

    Attributes:
        pieces: Fixed ids before the first slot, between slots and after the last: one more than
            there are slots.
        slot_lengths: Tokens of each slot; 0 is an equal share of what the others leave.
        head: How many of the first ids all frames of a run share: the LM reads them once.
        template: The text that it was made from, if any.
        chat: Whether that was a chat message.
        reasoning: What the LM has still to write behind all this; None once it is there.
    """

    pieces: tuple[tuple[int, ...], ...] = ((), ())
    slot_lengths: tuple[int, ...] = (0,)
    head: int = 0
    template: str | None = None
    chat: bool = False
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        """Refuse what is no frame: files may hold anything."""
        if (
            not self.slot_lengths
            or len(self.pieces) != len(self.slot_lengths) + 1
            or min(self.slot_lengths) < 0
            or not 0 <= self.head <= len(self.pieces[0])
        ):
            raise InputError(
                "Expected a frame to have one piece more than slots, of lengths of at least 0, but "
                f"got {len(self.pieces)} pieces and slots of {list(self.slot_lengths)} tokens."
            )

    @property
    def fixed_ids(self) -> tuple[int, ...]:
        """All fixed tokens, as if the slots were empty."""
        return tuple(token_id for piece in self.pieces for token_id in piece)

    @property
    def given_ids(self) -> tuple[int, ...]:
        """All ids that are not the LM's own: the fixed tokens and those of the trigger."""
        return (*self.fixed_ids, *(self.reasoning.trigger_ids if self.reasoning else ()))

    @property
    def most_tokens(self) -> int:
        """Fixed tokens, with as much reasoning as there may be."""
        return len(self.given_ids) + (self.reasoning.max_tokens if self.reasoning else 0)

    def sizes(self, prompt_length: int) -> tuple[int, ...]:
        """Tokens of each slot; where shares are uneven, the first slots get one more.

        >>> Frame(((1,), (), (2,), ()), (0, 3, 0)).sizes(8)
        (3, 3, 2)
        """
        left = prompt_length - sum(self.slot_lengths)
        shares = self.slot_lengths.count(0)
        if left < shares or (left and not shares):
            given = " + ".join(str(n) for n in self.slot_lengths if n) or "0"
            raise InputError(
                f"Expected the slots of `data.template` to hold `model.prompt_length` "
                f"({prompt_length}) tokens together, but those with a length have {given}"
                f"{f' and {shares} more want at least 1 each' if shares else ''}. Change "
                "`model.prompt_length`, or leave a slot's length out (`{slot}`)."
            )
        sizes, seen = [], 0
        for length in self.slot_lengths:
            sizes.append(length or left // shares + (seen < left % shares))
            seen += length == 0
        return tuple(sizes)

    def places(self, prompt_length: int) -> list[int]:
        """Where the learned tokens stand in the whole prompt."""
        places: list[int] = []
        start = 0
        for piece, size in zip(self.pieces, self.sizes(prompt_length), strict=False):
            start += len(piece)
            places += range(start, start + size)
            start += size
        return places

    def full_ids(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The whole prompt: learned tokens between the fixed ones.

        >>> Frame(((1, 2), (3,))).full_ids([7, 8])
        (1, 2, 7, 8, 3)
        """
        learned, full = iter(prompt_ids), list(self.pieces[0])
        for piece, size in zip(self.pieces[1:], self.sizes(len(prompt_ids)), strict=True):
            full += [next(learned) for _ in range(size)]
            full += piece
        return tuple(full)

    def behind(self, prompt_ids: Sequence[int], count: int) -> "Frame":
        """The frame of the other learned tokens, where the first `count` stay as they are.

        These are fixed then, and the LM reads them once, with all that stands before the rest.

        >>> narrow = Frame(((1,), (2,), (3,)), (2, 0)).behind([7, 8, 9], 1)
        >>> narrow.pieces, narrow.slot_lengths, narrow.head
        (((1, 7), (2,), (3,)), (1, 1), 2)
        """
        full = self.full_ids(prompt_ids)
        places = self.places(len(prompt_ids))[count:]
        pieces: list[tuple[int, ...]] = []
        lengths: list[int] = []
        end = 0  # of what has been laid out
        for place in places:
            if lengths and place == end:
                lengths[-1] += 1
            else:
                pieces.append(full[end:place])
                lengths.append(1)
            end = place + 1
        pieces.append(full[end:])
        return replace(self, pieces=tuple(pieces), slot_lengths=tuple(lengths), head=places[0])

    def after(self, reasoning_ids: Sequence[int]) -> "Frame":
        """The same with the reasoning that was wanted, and its trigger, as fixed tokens.

        >>> Frame(((1,), (2,)), reasoning=Reasoning(9, "!", (5,))).after([3, 4]).pieces
        ((1,), (2, 3, 4, 5))
        """
        if self.reasoning is None:
            return self
        last = (*self.pieces[-1], *reasoning_ids, *self.reasoning.trigger_ids)
        return replace(self, pieces=(*self.pieces[:-1], last), reasoning=None)


NO_FRAME = Frame()


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
    """One place where a prompt is read, and what the LM is to say there.

    Attributes:
        id: Its name.
        ids: The M token ids to be produced.
        text: Their text.
        frame: What stands around the prompt.
    """

    id: str
    ids: tuple[int, ...]
    text: str
    frame: Frame = NO_FRAME

    def after(self, reasoning_ids: Sequence[int]) -> "Example":
        """The same with the LM's reasoning in its frame, where it wants some."""
        if self.frame.reasoning is None:
            return self
        return replace(self, frame=self.frame.after(reasoning_ids))

    def paid_tokens(self, prompt_length: int) -> int:
        """Tokens that the LM reads in one pass over a prompt and all of the target but its last."""
        fixed = sum(map(len, self.frame.pieces)) - self.frame.head
        return prompt_length + fixed + len(self.ids) - 1


@dataclass(frozen=True)
class SharedExamples:
    """Examples that share one prompt.

    Attributes:
        pool: Those that steps learn from.
        per_step: How many of them each step reads.
        held_out: Those that only the final prompt is tried on.
    """

    pool: tuple[Example, ...]
    per_step: int
    held_out: tuple[Example, ...] = ()
