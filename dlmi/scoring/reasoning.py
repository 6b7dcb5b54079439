"""The LM's own reasoning: what it writes after a discrete prompt, before it is to answer.

In a context with a `Reasoning` the LM first decodes greedily after the prompt, then the trigger is
appended, and the target comes after both. Once written, reasoning is a part of the fixed tokens.
"""

from collections.abc import Sequence

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.context import Example, Reasoning


def write_reasoning(
    lm: FrozenLM, prompts: Sequence[Sequence[int]], examples: Sequence[Example]
) -> list[tuple[int, ...]]:
    """What the LM writes after each prompt's ids in its example; () where none is asked for."""
    written: list[tuple[int, ...]] = [() for _ in examples]
    asked: dict[Reasoning, dict[tuple[int, ...], list[int]]] = {}  # equal rows are written once
    for row, (prompt_ids, example) in enumerate(zip(prompts, examples, strict=True)):
        context = example.context
        if context.reasoning is not None:
            ids = context.ids(prompt_ids)
            asked.setdefault(context.reasoning, {}).setdefault(ids, []).append(row)
    for reasoning, rows_of in asked.items():
        said = lm.generate(list(rows_of), reasoning.max_tokens)
        for rows, said_ids in zip(rows_of.values(), said, strict=True):
            for row in rows:
                written[row] = tuple(said_ids)
    return written


def tokens_to_write(example: Example, reasoning_ids: Sequence[int], prompt_length: int) -> int:
    """Tokens that the LM reads to write its reasoning: the prompt, and all but its last token."""
    reasoning = example.context.reasoning
    if reasoning is None:
        return 0
    read = min(len(reasoning_ids), reasoning.max_tokens - 1)
    return prompt_length + len(example.context.fixed_ids) + read
