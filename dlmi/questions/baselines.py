"""Baselines of a prompt: an empty one, a well-known phrase, and random tokens."""

import random
from collections.abc import Iterator, Sequence

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.questions.scoring import Accuracy, Decoding, score_prompt
from dlmi.targets.questions import Question
from dlmi.targets.template import Template
from dlmi.tokens.token_sets import select_tokens

EMPTY = "nothing"
PHRASE = " Let's think step by step."


def random_prompts(lm: FrozenLM, length: int, draws: int, seed: int) -> list[list[int]]:
    """Random prompts without special tokens, the same for the same seed."""
    ids = select_tokens(lm, lm.prompt_token_ids.tolist(), "no_special")
    draw = random.Random(seed)
    return [[draw.choice(ids) for _ in range(length)] for _ in range(draws)]


def score_each(
    lm: FrozenLM,
    template: Template,
    prompts: Sequence[str | Sequence[int]],
    questions: Sequence[Question],
    decoding: Decoding | None = None,
    draws: int = 3,
    seed: int = 0,
) -> Iterator[tuple[str, Accuracy]]:
    """The accuracy of baselines and prompts, each with its name.

    First the empty prompt, then the phrase, then random prompts as long as the longest prompt, then
    the prompts. The other arguments are those of `score_prompt`.
    """
    lengths = [len(lm.encode(p)) if isinstance(p, str) else len(p) for p in prompts]
    length = max([*lengths, 1]) if prompts else len(lm.encode(PHRASE))
    named: dict[str, str | Sequence[int]] = {EMPTY: "", "step by step": PHRASE}
    for number, ids in enumerate(random_prompts(lm, length, draws, seed), start=1):
        named[f"random {number}"] = ids
    for number, prompt in enumerate(prompts, start=1):
        named[f"prompt {number}"] = prompt
    for name, prompt in named.items():
        yield name, score_prompt(lm, template, prompt, questions, decoding)


def changes(scores: dict[str, Accuracy]) -> dict[str, float | None]:
    """(acc - acc0) / acc0 of each score, with acc0 of the empty prompt; None where that is 0."""
    first = scores[EMPTY].value
    return {name: (s.value - first) / first if first else None for name, s in scores.items()}
