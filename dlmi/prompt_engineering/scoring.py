r"""How often an LM answers right when a discrete prompt stands in the slot of a template.

Two ways to be asked. *Answer only*: the LM goes on after the template, up to the end of the line,
and the answer is looked for in what it says. *Two stages*: it first writes its reasoning, as long
as it likes up to a limit, then a trigger such as "\n####" is put behind that, and the answer is
what it says after the trigger.

Everything is decoded greedily, really, from the discrete prompt. The interval around an accuracy is
Wilson's at 95%, over the examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlmi.errors import InputError
from dlmi.lm import FrozenLM
from dlmi.prompt_engineering.answers import find_answer, is_number
from dlmi.prompt_engineering.decoding import decode_greedily
from dlmi.prompt_engineering.examples import Example
from dlmi.prompt_engineering.template import QuestionTemplate

TRIGGER = "\\n####"  # what is usually put behind reasoning, as an option has it
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Decoding:
    r"""How answers are decoded.

    Attributes:
        max_new_tokens: Tokens of an answer at most.
        stop: A text that ends an answer; None for the end of the sequence alone.
        trigger: What is put behind the LM's reasoning, such as "\n####"; None for no reasoning.
        max_reasoning_tokens: Tokens of the reasoning at most.
        batch_size: Questions that are decoded side by side.
    """

    max_new_tokens: int = 48
    stop: str | None = "\n"
    trigger: str | None = None
    max_reasoning_tokens: int = 96
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_reasoning_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"Expected `{name}` to be at least 1, but got {getattr(self, name)}."
                )


@dataclass(frozen=True)
class Answered:
    """What came of one question.

    Attributes:
        question: The question.
        expected: The right answer, normalised.
        output_text: What the LM said; in two stages, with its reasoning and the trigger.
        answer: What was found in it, normalised.
        is_right: Whether that is the right one.
    """

    question: str
    expected: str
    output_text: str
    answer: str | None
    is_right: bool


@dataclass(frozen=True)
class Accuracy:
    """Of one prompt over some examples.

    Attributes:
        prompt_text: The prompt, as text.
        prompt_ids: Its ids, where it was given as ids.
        answered: Every example.
    """

    prompt_text: str
    prompt_ids: tuple[int, ...] | None
    answered: tuple[Answered, ...]

    @property
    def right(self) -> int:
        """How many answers are right."""
        return sum(answer.is_right for answer in self.answered)

    @property
    def value(self) -> float:
        """The share of right answers."""
        return self.right / len(self.answered)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's at 95%."""
        return wilson_interval(self.right, len(self.answered))


def wilson_interval(right: int, total: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's score interval of a share.

    >>> [round(end, 3) for end in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    share = right / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def relative_change(accuracy: float, baseline: float) -> float | None:
    """(acc - acc0) / acc0; None where the baseline has none right."""
    return (accuracy - baseline) / baseline if baseline else None


def score_prompt(
    lm: FrozenLM,
    template: QuestionTemplate,
    prompt: str | Sequence[int],
    examples: Sequence[Example],
    decoding: Decoding | None = None,
) -> Accuracy:
    """Ask an LM every question with a prompt in the slot.

    Args:
        lm: The model.
        template: What stands around question and prompt.
        prompt: As text, or as ids.
        examples: Questions with their answers, at least one.
        decoding: How answers are decoded.
    """
    how = Decoding() if decoding is None else decoding
    rows = [template.ids(lm, example.question, prompt) for example in examples]
    opening = ""
    reasoning: list[list[int]] = [[] for _ in rows]
    if how.trigger is not None:
        reasoning = decode_greedily(lm, rows, how.max_reasoning_tokens, batch_size=how.batch_size)
        opening = how.trigger
        trigger_ids = lm.encode(opening)
        rows = [[*row, *said, *trigger_ids] for row, said in zip(rows, reasoning, strict=True)]
    said_ids = decode_greedily(lm, rows, how.max_new_tokens, how.stop, how.batch_size)
    answered = tuple(
        _judge(example, lm.decode(first) + opening, lm.decode(ids))
        for example, first, ids in zip(examples, reasoning, said_ids, strict=True)
    )
    if isinstance(prompt, str):
        return Accuracy(prompt, None, answered)
    return Accuracy(lm.decode(prompt), tuple(prompt), answered)


def _judge(example: Example, before: str, said: str) -> Answered:
    """The answer is looked for in what was said last, behind the trigger where there is one."""
    numeric = is_number(example.final)
    answer = find_answer(f"#### {said}" if before else said, numeric)
    return Answered(example.question, example.final, before + said, answer, answer == example.final)
