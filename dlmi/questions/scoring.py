r"""The accuracy of an LM's answers to questions with a discrete prompt in a template.

*Answer only*: the LM continues the template up to the end of the line, and the answer is searched
for in that output. *Two stages*: it first writes its reasoning, up to a limit, then a trigger such
as "\n####" is appended, and the answer is searched for in the output after the trigger.

Decoding is greedy. The interval of an accuracy is Wilson's at 95%, over the questions. Baselines of
a prompt are an empty one, a well-known phrase, and random tokens.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.questions import Question, find_answer, is_number
from dlmi.targets.template import Template
from dlmi.tokens.token_sets import select_tokens

EMPTY = "nothing"
PHRASE = " Let's think step by step."


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded."""

    max_new_tokens: int = 48  # of an answer
    stop: str | None = "\n"  # a text that ends an answer; None: only the end of the sequence
    trigger: str | None = None  # appended to the LM's reasoning; None for no reasoning
    max_reasoning_tokens: int = 96
    batch_size: int = 16  # questions that are decoded together

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_reasoning_tokens", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"Expected `{name}` to be at least 1, but got {value}.")


@dataclass(frozen=True)
class Answered:
    """One question with the LM's answer."""

    question: str
    expected: str  # the right answer, normalised
    output_text: str  # in two stages, with the reasoning and the trigger
    answer: str | None  # found in the output, normalised
    is_right: bool


@dataclass(frozen=True)
class Accuracy:
    """The answers with one prompt; its ids are None if it was given as text."""

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
        interval = binomtest(self.right, len(self.answered)).proportion_ci(method="wilson")
        return float(interval.low), float(interval.high)


def check_template(template: Template) -> None:
    """Raise `InputError` unless a template asks a question."""
    if template.fields != ["question"]:
        raise InputError(
            f"Expected `template` to have {{question}} once, and no other field, but got "
            f"{template.text!r}."
        )


def score_prompt(
    lm: FrozenLM,
    template: Template,
    prompt: str | Sequence[int],
    questions: Sequence[Question],
    how: Decoding = Decoding(),  # noqa: B008  # it is frozen
) -> Accuracy:
    """Ask an LM every question (at least one) with a prompt in the template."""
    rows = [
        template.ids(lm, question.fields, prompt, f"question {number}")
        for number, question in enumerate(questions, start=1)
    ]
    trigger = how.trigger or ""
    reasoning: list[list[int]] = [[] for _ in rows]
    if how.trigger is not None:
        reasoning = lm.generate(rows, how.max_reasoning_tokens, batch_size=how.batch_size)
        trigger_ids = lm.encode(trigger)
        rows = [[*row, *said, *trigger_ids] for row, said in zip(rows, reasoning, strict=True)]
    said_ids = lm.generate(rows, how.max_new_tokens, how.stop, how.batch_size)
    answered = tuple(
        _judge(question, lm.decode(first) + trigger, lm.decode(ids))
        for question, first, ids in zip(questions, reasoning, said_ids, strict=True)
    )
    if isinstance(prompt, str):
        return Accuracy(prompt, None, answered)
    return Accuracy(lm.decode(prompt), tuple(prompt), answered)


def _judge(question: Question, before: str, said: str) -> Answered:
    """Search for the answer in the last output, after the trigger if there is one."""
    final = question.final
    answer = find_answer(f"#### {said}" if before else said, is_number(final))
    return Answered(question.question, final, before + said, answer, answer == final)


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
    how: Decoding = Decoding(),  # noqa: B008  # it is frozen
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
        yield name, score_prompt(lm, template, prompt, questions, how)


def changes(scores: dict[str, Accuracy]) -> dict[str, float | None]:
    """(acc - acc0) / acc0 of each score, with acc0 of the empty prompt; None where that is 0."""
    first = scores[EMPTY].value
    return {name: (s.value - first) / first if first else None for name, s in scores.items()}
