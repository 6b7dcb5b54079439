"""What a target may use, and when it has had enough."""

from collections.abc import Sequence
from dataclasses import dataclass

from dlmi.methods.slot import Slot
from dlmi.scoring.evaluation import most_tokens_evaluated
from dlmi.targets.context import Example

NO_STEP_LIMIT = 10**9  # steps, where a budget is one of time or of token-passes


@dataclass(frozen=True)
class Budget:
    """The budget of each target."""

    steps: int  # steps
    token_passes: int | None  # tokens sent forward or backward through the LM, or None for no limit
    prompt_length: int  # tokens of a prompt, N
    last_prompts: int = 0  # prompts that are decoded at the end, besides the final one
    can_share: bool = True  # whether the LM's keys and values can be shared and cut
    # Steps between two decodes; None: at doublings of the cost, and as below
    eval_every: int | None = None
    # Budgets at which to decode: token-passes, or steps where those have no limit
    decode_at: tuple[int, ...] = ()

    def share_used(self, slot: Slot) -> float:
        """Between 0 and 1: the larger share of the two."""
        used = slot.step / self.steps
        if self.token_passes is not None:
            used = max(used, slot.cost.total / self.token_passes)
        return min(used, 1.0)

    def most_evaluated(self, slot: Slot) -> int:
        """What one decode costs at most."""
        return most_tokens_evaluated(slot.target, self.prompt_length, self.can_share)

    def reserve(self, slot: Slot) -> int:
        """What the decodes at the end cost at most."""
        return (1 + self.last_prompts) * self.most_evaluated(slot)

    def left(self, slot: Slot) -> float:
        """Token-passes that a step may use: the decodes at the end are reserved."""
        if self.token_passes is None:
            return float("inf")
        return self.token_passes - slot.cost.total - self.reserve(slot)

    def most_reasoned(self, examples: Sequence[Example]) -> int:
        """What the LM's own reasoning in some examples costs at most."""
        return sum(
            len(e.context.start_ids) + e.context.most_tokens + self.prompt_length for e in examples
        )

    def is_due(self, slot: Slot) -> bool:
        """Whether to decode now: at the start, on the beat, at the end, or on a good sign.

        A decode that would use what is reserved for the end is the end.
        """
        if slot.last is not None and slot.last.step == slot.step:
            return False
        if self.stop_reason(slot) is not None:
            return True
        if slot.found_ids is None and not self._is_on_beat(slot):
            return False
        if self.most_evaluated(slot) > self.left(slot):
            slot.is_spent = slot.step > 0 or slot.is_spent
        return True

    def _is_on_beat(self, slot: Slot) -> bool:
        """Every so many steps; else when the cost has doubled, and where a budget would be crossed.

        Teacher forcing tells a search when its prompt is exact, so that it need not decode to know.
        """
        if self.eval_every is not None:
            return slot.step % self.eval_every == 0
        if not slot.trace:
            return True
        if self.token_passes is None and slot.step in self.decode_at:
            return True
        cost, last = slot.cost.total, slot.trace[-1].token_passes
        # A step may take twice the mean; the decode itself must fit as well.
        ahead = 2 * cost // max(slot.step, 1) + self.most_evaluated(slot)
        is_crossed = self.token_passes is not None and any(
            last + ahead < budget <= cost + ahead for budget in self.decode_at
        )
        return is_crossed or cost >= 2 * last

    def stop_reason(self, slot: Slot) -> str | None:
        """`solved`, `failed`, `budget`, or None while it is to go on."""
        best = slot.best
        if best is not None and best.is_eligible and best.output_ids == slot.target.ids:
            return "solved"
        if slot.failure is not None:
            return "failed"
        return "budget" if slot.is_spent or slot.step >= self.steps else None
