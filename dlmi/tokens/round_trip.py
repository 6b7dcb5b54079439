"""Round trips: prompts whose text encodes to the ids that were measured.

Tokens that survive decoding and encoding alone may still merge with their neighbours, so a prompt
is repaired before it is measured. If its text encodes to the same number of ids, these become the
prompt. Otherwise a token at the first difference between the two is replaced by an alternative.
"""

from collections.abc import Callable, Iterable, Sequence

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.context import NO_CONTEXT, Context, common_beginning

_ATTEMPTS = 64  # and a few more for each token of the prompt


def round_trips(
    lm: FrozenLM, prompts: Sequence[Sequence[int]], context: Context = NO_CONTEXT
) -> list[bool]:
    """Whether the text of each prompt in its context encodes to the same ids."""
    if not prompts:
        return []
    whole = [list(context.text_ids(ids)) for ids in prompts]
    texts = [lm.decode(ids) for ids in whole]
    encoded = lm.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    return [again == ids for again, ids in zip(encoded["input_ids"], whole, strict=True)]


def repair(
    lm: FrozenLM,
    context: Context,
    ids: Sequence[int],
    alternatives: Sequence[Iterable[int]],
    allows: Callable[[int], bool],
) -> list[int]:
    """A prompt of N ids, changed until it round-trips; unchanged if that fails.

    `alternatives` are the token ids to try at each of the N positions, in order, and `allows` tells
    whether the prompt may hold a token.
    """
    repaired = list(ids)
    positions = context.positions(len(repaired))
    untried = [iter(tokens) for tokens in alternatives]
    for attempt in range(_ATTEMPTS + 4 * len(repaired)):
        text_ids = context.text_ids(repaired)
        encoded = lm.encode(lm.decode(text_ids))
        if encoded == list(text_ids):
            return repaired
        if len(encoded) == len(text_ids):
            same_text = [encoded[position] for position in positions]
            if all(map(allows, same_text)) and all(round_trips(lm, [same_text], context)):
                return same_text
        # Two tokens that merge: replace the one or the other in turn, so that neither stays.
        differs = len(common_beginning([text_ids, tuple(encoded)]))
        place = min(sum(p < differs for p in positions) + attempt % 2, len(repaired) - 1)
        repaired[place] = next(untried[place], repaired[place])
    return list(ids)
