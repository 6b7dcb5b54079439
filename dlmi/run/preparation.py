"""What the next step of a slot reads: its mini-batch, with the LM's own reasoning written."""

from typing import Any

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.base import Method
from dlmi.methods.slot import Slot
from dlmi.run.budget import Budget
from dlmi.scoring.passes import Cost
from dlmi.scoring.reasoning import tokens_to_write, write_reasoning


def prepare_step(slot: Slot, method: Method[Any], lm: FrozenLM, budget: Budget) -> bool:
    """Set a slot's examples and progress; False where the budget does not cover the reasoning.

    What the LM wrote after the same prompt in an earlier step is known. Each slot's is written by
    itself, so that no slot feels its batch mates.
    """
    slot.progress = budget.share_used(slot)
    slot.examples = slot.target.minibatch(slot.step, slot.key)
    if not slot.target.reasons:
        return True
    prompt_ids = tuple(method.prompt_ids(slot, slot.state).tolist())
    if slot.reasoned_ids != prompt_ids:
        slot.reasoned_ids, slot.reasoning = prompt_ids, {}
    wanted = [e for e in slot.examples if e.context.reasoning and e.id not in slot.reasoning]
    if budget.most_reasoned(wanted) > budget.left(slot):
        slot.is_spent = True
        return False
    written = write_reasoning(lm, [prompt_ids] * len(wanted), wanted)
    for example, ids in zip(wanted, written, strict=True):
        slot.reasoning[example.id] = ids
        slot.cost += Cost(tokens_to_write(example, ids, slot.length))
    slot.examples = tuple(e.after(slot.reasoning.get(e.id, ())) for e in slot.examples)
    return True
