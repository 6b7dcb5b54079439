"""The LM's own reasoning: what it writes after a discrete prompt, before it is to answer.

A context with a `Reasoning` is not complete: the LM first goes on greedily after the prompt, then
the trigger is appended, and what it is to say comes after both. Once written, reasoning is fixed
tokens like any other, so that losses, gradients and decodes need not know of it.
"""

from collections.abc import Sequence

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.context import Example, Reasoning


def write_reasoning(
    lm: FrozenLM, prompts: Sequence[Sequence[int]], examples: Sequence[Example]
) -> list[tuple[int, ...]]:
    """What the LM writes after each prompt in its context; nothing where none is asked for.

    Args:
        lm: The model.
        prompts: Ids of R discrete prompts, N each.
        examples: R of them.
    """
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
    """Tokens that the LM reads to write its reasoning: the prompt, and all but a last one."""
    reasoning = example.context.reasoning
    if reasoning is None:
        return 0
    read = min(len(reasoning_ids), reasoning.max_tokens - 1)
    return prompt_length + len(example.context.fixed_ids) + read
