"""What a target may use, when its prompt is decoded, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from dlmi.methods.slot import Slot
from dlmi.scoring.evaluation import most_tokens_evaluated
from dlmi.targets.context import Example

NO_STEP_LIMIT = 10**9  # steps, where a budget is one of time or of token-passes
_RARE = 32  # times the cost of a decode: what is spent before the cost counts as doubled


@dataclass(frozen=True)
class Budget:
    """The budget of each target."""

    steps: int
    token_passes: int | None = (
        None  # tokens sent forward or backward through the LM; None: no limit
    )
    last_prompts: int = 0  # prompts that are decoded at the end, besides the final one
    # Steps between two decodes; None: when the cost has doubled, and as below
    eval_every: int | None = None
    # Budgets at which to decode: token-passes, or steps where those have no limit
    decode_at: tuple[int, ...] = ()

    def share_used(self, slot: Slot) -> float:
        """Between 0 and 1: the larger share of the two."""
        used = slot.step / self.steps
        if self.token_passes is not None:
            used = max(used, slot.cost.total / self.token_passes)
        return min(used, 1.0)

    def reserve(self, slot: Slot) -> int:
        """Upper bound on the cost of the decodes at the end."""
        return (1 + self.last_prompts) * most_evaluated(slot)

    def left(self, slot: Slot) -> float:
        """Token-passes that a step may use: the decodes at the end are reserved."""
        if self.token_passes is None:
            return float("inf")
        return self.token_passes - slot.cost.total - self.reserve(slot)

    def is_due(self, slot: Slot) -> bool:
        """Whether to decode now: first, at the interval, last, or when a prompt seems exact.

        A decode that would use what is reserved for the end ends the target.
        """
        if slot.last is not None and slot.last.step == slot.step:
            return False
        if self.stop_reason(slot) is not None:
            return True
        if slot.found_ids is None and not self._is_at_interval(slot):
            return False
        if most_evaluated(slot) > self.left(slot):
            slot.is_spent = slot.step > 0 or slot.is_spent
        return True

    def _is_at_interval(self, slot: Slot) -> bool:
        """Whether `eval_every` steps have passed, or the cost has doubled or nears `decode_at`."""
        if self.eval_every is not None:
            return slot.step % self.eval_every == 0
        if not slot.trace:
            return True
        if self.token_passes is None and slot.step in self.decode_at:
            return True
        cost, last = slot.cost.total, slot.trace[-1].token_passes
        # A step may take twice the mean; the decode itself must fit as well.
        ahead = 2 * cost // max(slot.step, 1) + most_evaluated(slot)
        is_crossed = self.token_passes is not None and any(
            last + ahead < budget <= cost + ahead for budget in self.decode_at
        )
        # A decode reads token by token, so it takes several times as long as its cost says.
        return is_crossed or cost >= max(2 * last, _RARE * most_evaluated(slot))

    def stop_reason(self, slot: Slot) -> str | None:
        """`solved`, `failed` or `budget`; None while the target goes on."""
        best = slot.best
        if best is not None and best.is_eligible and best.output_ids == slot.target.ids:
            return "solved"
        if slot.failure is not None:
            return "failed"
        return "budget" if slot.is_spent or slot.step >= self.steps else None


def most_evaluated(slot: Slot) -> int:
    """Upper bound on the cost of one decode."""
    return most_tokens_evaluated(slot.target, slot.length, slot.tokens.lm.can_share)


def most_reasoned(slot: Slot, examples: Sequence[Example]) -> int:
    """Upper bound on the cost of the LM's own reasoning in some examples."""
    return sum(len(e.context.start_ids) + e.context.most_tokens + slot.length for e in examples)
