"""Targets as result rows hold them."""

from dataclasses import replace

from dlmi.rows import Inversion
from dlmi.targets.context import NO_CONTEXT
from dlmi.targets.target import Target, with_start_ids


def target_of(row: Inversion, bos_id: int) -> Target:
    """What was to be said, and after what.

    Args:
        row: Of any age.
        bos_id: What stands before the prompt where the run has put BoS there.
    """
    if row.examples:
        target = Target(row.target_id, row.examples, held_out=row.held_out)
    else:
        context = row.context or NO_CONTEXT
        target = Target.single(row.target_id, row.target_ids, row.target_text, context)
    start_ids = (bos_id,) if row.settings.get("prompt_bos") else ()
    return with_start_ids([target], start_ids)[0]


def with_held_out(target: Target) -> Target:
    """The same with the examples that were held out among those that are measured."""
    return replace(target, examples=target.all_examples, held_out=())
