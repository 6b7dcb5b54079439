"""Targets as result rows hold them."""

from dataclasses import replace

from dlmi.rows import ContextRecord, ExampleResult, Inversion, ReasoningRecord
from dlmi.targets.context import NO_CONTEXT, Context, Example, Reasoning
from dlmi.targets.target import Target, with_start_ids


def context_of(record: ContextRecord | None) -> Context:
    """The context that a row says; `InputError` where that cannot be."""
    if record is None:
        return NO_CONTEXT
    reasoning = record.reasoning
    return Context(
        pieces=record.pieces,
        blank_lengths=record.blank_lengths,
        start_ids=record.start_ids,
        read_once=record.read_once,
        template=record.template,
        chat=record.chat,
        reasoning=None if reasoning is None else Reasoning(**vars(reasoning)),
    )


def record_of(context: Context) -> ContextRecord:
    """A context as rows hold it."""
    reasoning = context.reasoning
    return ContextRecord(
        pieces=context.pieces,
        blank_lengths=context.blank_lengths,
        start_ids=context.start_ids,
        read_once=context.read_once,
        template=context.template,
        chat=context.chat,
        reasoning=None
        if reasoning is None
        else ReasoningRecord(reasoning.max_tokens, reasoning.trigger, reasoning.trigger_ids),
    )


def target_of(row: Inversion, bos_id: int) -> Target:
    """What was to be said, and after what.

    Args:
        row: Of any age.
        bos_id: What stands before the prompt where the run has put BoS there.
    """
    examples = tuple(map(_example_of, row.examples))
    if examples:
        target = Target(row.target_id, examples, held_out=tuple(map(_example_of, row.held_out)))
    else:
        context = context_of(row.context)
        target = Target.single(row.target_id, row.target_ids, row.target_text, context)
    start_ids = (bos_id,) if row.settings.get("prompt_bos") else ()
    return with_start_ids([target], start_ids)[0]


def _example_of(result: ExampleResult) -> Example:
    return Example(result.id, result.ids, result.text, context_of(result.context))


def with_held_out(target: Target) -> Target:
    """The same with the examples that were held out among those that are measured."""
    return replace(target, examples=target.all_examples, held_out=())
