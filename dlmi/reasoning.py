"""The LM's own reasoning: what it writes after a discrete prompt, before it is to answer.

A frame with a `Reasoning` is not complete: the LM first goes on greedily after the prompt, then the
trigger is put behind that, and what it is to say comes after both. Once written, reasoning is fixed
tokens like any other, so that losses, gradients and decodes need not know of it.
"""

from collections.abc import Sequence

from dlmi.frames import Example, Reasoning
from dlmi.lm import FrozenLM
from dlmi.prompt_engineering.decoding import decode_greedily


def write_reasoning(
    lm: FrozenLM,
    prompts: Sequence[Sequence[int]],
    examples: Sequence[Example],
    prompt_bos: bool = False,
) -> list[tuple[int, ...]]:
    """What the LM writes after each prompt in its frame; nothing where a frame wants none.

    Args:
        lm: The model.
        prompts: Ids of R discrete prompts, N each.
        examples: R of them.
        prompt_bos: Put BoS before everything.
    """
    bos_ids = (lm.bos_id,) if prompt_bos else ()
    written: list[tuple[int, ...]] = [() for _ in examples]
    wanted: dict[Reasoning, dict[tuple[int, ...], list[int]]] = {}  # equal rows are written once
    for place, (prompt_ids, example) in enumerate(zip(prompts, examples, strict=True)):
        if example.frame.reasoning is not None:
            whole = (*bos_ids, *example.frame.full_ids(prompt_ids))
            wanted.setdefault(example.frame.reasoning, {}).setdefault(whole, []).append(place)
    for reasoning, places_of in wanted.items():
        said = decode_greedily(lm, list(places_of), reasoning.max_tokens)
        for places, ids in zip(places_of.values(), said, strict=True):
            for place in places:
                written[place] = tuple(ids)
    return written


def complete_examples(
    lm: FrozenLM,
    prompts: Sequence[Sequence[int]],
    examples: Sequence[Example],
    prompt_bos: bool = False,
) -> list[Example]:
    """The same examples with what the LM writes after each prompt in their frames."""
    written = write_reasoning(lm, prompts, examples, prompt_bos)
    return [example.after(ids) for example, ids in zip(examples, written, strict=True)]


def ids_with_reasoning(
    lm: FrozenLM, ids: Sequence[int], reasoning: Reasoning | None
) -> tuple[int, ...]:
    """A whole prompt, what the LM writes after it, and the trigger in the LM's own tokens."""
    if reasoning is None:
        return tuple(ids)
    [said] = decode_greedily(lm, [ids], reasoning.max_tokens)
    return *ids, *said, *lm.encode(reasoning.trigger)


def tokens_to_write(example: Example, reasoning_ids: Sequence[int], prompt_length: int) -> int:
    """Tokens that the LM reads to write its reasoning: the prompt, and all but a last one."""
    reasoning = example.frame.reasoning
    if reasoning is None:
        return 0
    read = min(len(reasoning_ids), reasoning.max_tokens - 1)
    return prompt_length + len(example.frame.fixed_ids) + read
