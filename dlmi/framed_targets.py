"""Targets of a run in their templates, and one prompt for all of them."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

from dlmi.errors import InputError
from dlmi.frames import NO_FRAME, Example, Frame, SharedExamples, common_beginning
from dlmi.lm import FrozenLM
from dlmi.prompt_engineering.examples import Example as Question
from dlmi.targets import Target
from dlmi.templates import Template

SHARED_ID = "shared"


def frame_target(lm: FrozenLM, target: Target, template: Template) -> Target:
    """A target whose tokens are known already, in a template without fields."""
    filled = template.fill(lm, {}, f"target {target.id}")
    return dataclasses.replace(target, frame=filled.frame)


def questions_to_targets(
    lm: FrozenLM,
    questions: Sequence[Question],
    template: Template,
    answer: Template,
    reasoning: tuple[int, str] | None = None,
) -> list[Target]:
    """One target per question: the text that answers it, after a template with its fields.

    Args:
        lm: The model.
        questions: With their answers.
        template: What stands around the prompt; it may hold `{question}`.
        answer: The text to be said; it may hold `{answer}` and `{final}`.
        reasoning: Tokens at most that the LM reasons with before, and the trigger behind that.
    """
    targets = []
    for number, question in enumerate(questions):
        where = f"question {number + 1}"
        fields = {"question": question.question, "answer": question.answer, "final": question.final}
        filled, text = template.fill(lm, fields, where), answer.text_of(fields, where)
        if reasoning is not None:
            filled = filled.with_reasoning(lm, *reasoning)
        ids = filled.continuation_ids(lm, text, where)
        if not ids:
            raise InputError(f"Expected the answer to {where} to have tokens, but got {text!r}.")
        targets.append(Target(f"question_{number}", ids, text, frame=filled.frame))
    return targets


def share_prompt(
    targets: Sequence[Target],
    per_step: int,
    evaluated: int | None = None,
    held_out: Sequence[Target] = (),
) -> Target:
    """One target of many: a prompt is learned that is to work for all of them.

    Args:
        targets: What steps learn from.
        per_step: How many of them each step reads.
        evaluated: How many of them, the first ones, an evaluation reads; None for all.
        held_out: What only the final prompt is tried on.
    """
    pool = [reading for target in targets for reading in target.readings]
    seen = pool[:evaluated]
    target = Target(SHARED_ID, (), "\n".join(example.text for example in seen))
    others = tuple(reading for target in held_out for reading in target.readings)
    return dataclasses.replace(
        target.with_examples(seen), shared=SharedExamples(tuple(pool), per_step, others)
    )


def share_head(targets: Sequence[Target]) -> list[Target]:
    """The targets of a run, with what all of them start with marked to be read once."""
    readings = [reading for target in targets for reading in target.all_readings]
    head = len(common_beginning([reading.frame.pieces[0] for reading in readings]))
    return [_mark(target, head) for target in targets]


def _mark(target: Target, head: int) -> Target:
    def frame(frame: Frame) -> Frame:
        return frame if frame.head == head else dataclasses.replace(frame, head=head)

    def each(examples: Iterable[Example]) -> tuple[Example, ...]:
        return tuple(dataclasses.replace(e, frame=frame(e.frame)) for e in examples)

    shared = target.shared
    if shared is None and not target.examples:
        return dataclasses.replace(target, frame=frame(target.frame))
    if shared is not None:
        shared = dataclasses.replace(shared, pool=each(shared.pool), held_out=each(shared.held_out))
    return dataclasses.replace(target, examples=each(target.examples), shared=shared)


def fingerprint_targets(targets: Iterable[Target]) -> str:
    """A short hash over the ids of the targets, their tokens and frames: tells sets apart."""
    lines = [
        ":".join([target.id, *(_content(example) for example in target.all_readings)])
        for target in targets
    ]
    lines += [
        f"{len(target.readings)} of {len(target.shared.pool)}, {target.shared.per_step} a step"
        for target in targets
        if target.shared is not None
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _content(example: Example) -> str:
    frame = example.frame
    around = (frame.pieces, frame.slot_lengths)
    reasoning = "" if frame.reasoning is None else str(frame.reasoning)
    return f"{example.ids}{'' if around == (NO_FRAME.pieces, (0,)) else around}{reasoning}"
