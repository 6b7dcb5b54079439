"""Prompts that survive being pasted: their text encodes to the very ids that were measured.

Tokens that survive alone may still merge with their neighbours, so a prompt as the optimiser has it
is mended before it is measured. Where its text has other ids of the same number, these are the
prompt. Else, where ids and text part, a token is replaced by the one that the method would have
liked next, and by a random one where it has no such order or runs out of it.

Axes: R prompts, N prompt tokens, A alternatives of a position.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlmi.lm import FrozenLM
from dlmi.slots import Slot
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

_LIKED, _RANDOM = 16, 48  # alternatives of a position
_ATTEMPTS = 64  # and a few more for each token of the prompt


def round_trips(lm: FrozenLM, ids: Sequence[int], target: Target | None = None) -> bool:
    """Whether the text of a prompt encodes to its ids again, with what a target has around it.

    Of examples the first counts: what stands beside the slots is mostly the same in all.
    """
    full_ids = ids if target is None else target.readings[0].frame.full_ids(ids)
    return lm.encode(lm.decode(full_ids)) == list(full_ids)


def surviving(vocabulary: Vocabulary, columns: Tensor, target: Target) -> Tensor:
    """Which prompts of a target do so: columns (R, N) to a mask (R,)."""
    rows = vocabulary.ids(columns).tolist()
    keep = [round_trips(vocabulary.lm, row, target) for row in rows]
    return torch.tensor(keep, dtype=torch.bool, device=columns.device)


def mend_prompts(
    vocabulary: Vocabulary,
    slot: Slot,
    prompt_ids: Tensor,
    preferences: Callable[[], Tensor | None],
) -> Tensor:
    """Prompts of a slot, each changed as little as it takes to survive, (R, N).

    One that cannot be mended stays as it is. The slot's random numbers are not touched, and a
    prompt is always mended in the same way.

    Args:
        vocabulary: What a prompt may hold.
        slot: Whose prompts they are.
        prompt_ids: (R, N).
        preferences: Gives logits of the tokens at each position, (N, V), or None.
    """
    alternatives: list[list[int]] | None = None
    rows: list[list[int]] = prompt_ids.tolist()
    for row, ids in enumerate(rows):
        if not round_trips(vocabulary.lm, ids, slot.target):
            if alternatives is None:
                alternatives = _alternatives(vocabulary, slot, len(ids), preferences())
            rows[row] = _mend(vocabulary, slot, ids, alternatives)
    return prompt_ids.new_tensor(rows)


def _alternatives(
    vocabulary: Vocabulary, slot: Slot, length: int, logits: Tensor | None
) -> list[list[int]]:
    """Token ids to try at each position, in order, N x A."""
    allowed = vocabulary.allowed_columns(slot.target).cpu()
    generator = torch.Generator().manual_seed(slot.noise_key)
    picks = torch.randint(len(allowed), (length, _RANDOM), generator=generator)
    columns = allowed[picks]
    if logits is not None:
        count = min(_LIKED, len(allowed))  # barred columns are the last in order
        columns = torch.cat([logits.topk(count, dim=-1).indices.cpu(), columns], dim=1)
    found: list[list[int]] = vocabulary.ids(columns).tolist()
    return found


def _mend(
    vocabulary: Vocabulary, slot: Slot, ids: list[int], alternatives: list[list[int]]
) -> list[int]:
    lm, mended = vocabulary.lm, list(ids)
    frame = slot.target.readings[0].frame
    places = frame.places(len(ids))
    untried = [iter(tokens) for tokens in alternatives]
    for attempt in range(_ATTEMPTS + 4 * len(ids)):
        full_ids = frame.full_ids(mended)
        full_again = lm.encode(lm.decode(full_ids))
        if full_again == list(full_ids):
            return mended
        if len(full_again) == len(full_ids):
            again = [full_again[place] for place in places]
            if all(vocabulary.allows(token_id, slot.target) for token_id in again) and round_trips(
                lm, again, slot.target
            ):
                return again
        # Two tokens that merge: one of them has to go, in turn, so that neither blocks the way.
        differs = _first_difference(full_ids, full_again)
        position = min(sum(place < differs for place in places) + attempt % 2, len(ids) - 1)
        mended[position] = next(untried[position], mended[position])
    return ids


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(ids, others, strict=False)
    shorter = min(len(ids), len(others))
    return next((i for i, (mine, other) in enumerate(pairs) if mine != other), shorter)
