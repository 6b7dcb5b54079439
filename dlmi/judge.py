"""Decodes the discrete prompts of slots, and charges the slots for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmi.evaluation import Evaluation, decoded_tokens, evaluate_prompts, mean_lcs, read_alone
from dlmi.lm import FrozenLM
from dlmi.passes import row_tokens
from dlmi.round_trip import round_trips
from dlmi.slots import Slot


@dataclass(frozen=True)
class Judge:
    """What decides how good a prompt is.

    Attributes:
        lm: The model.
        prompt_bos: Put BoS before each prompt.
        must_round_trip: Prompts that do not survive decoding and encoding are never the best.
    """

    lm: FrozenLM
    prompt_bos: bool
    must_round_trip: bool = False

    def evaluate(self, slots: Sequence[Slot], prompt_ids: Tensor) -> None:
        """Record how the slots' prompts, (B, N), do now; a prompt seen just before is known."""
        rows = [tuple(row) for row in prompt_ids.tolist()]
        is_new = [
            s.last is None or s.last.prompt_ids != row for s, row in zip(slots, rows, strict=True)
        ]
        fresh = [slot for slot, new in zip(slots, is_new, strict=True) if new]
        decoded = iter(self._decode(fresh, prompt_ids[torch.tensor(is_new)]) if fresh else [])
        for slot, new in zip(slots, is_new, strict=True):
            if new:
                evaluation = next(decoded)
            else:
                assert slot.last is not None
                evaluation = replace(slot.last, step=slot.step)
            if slot.loss is not None and slot.output_ids is not None:
                trained_on = slot.target_at(slot.step - 1)
                evaluation = replace(
                    evaluation,
                    loss=float(slot.loss),
                    as_in_code_lcs=mean_lcs(trained_on, slot.output_ids.tolist()),
                )
            slot.record(evaluation)

    def try_more(self, slot: Slot, prompt_ids: Tensor) -> None:
        """Record the best of further prompts of a slot, (C, N)."""
        candidates = self._decode([slot] * len(prompt_ids), prompt_ids)
        best, before = max(candidates, key=lambda candidate: candidate.score), slot.last
        assert before is not None
        slot.record(replace(best, loss=before.loss, as_in_code_lcs=before.as_in_code_lcs))

    def decode_alone(self, slot: Slot, evaluation: Evaluation) -> Evaluation:
        """The same prompt again, with no batch mates."""
        output_ids, loss = read_alone(self.lm, evaluation.prompt_ids, slot.target, self.prompt_bos)
        return replace(
            evaluation,
            output_ids=output_ids,
            lcs=mean_lcs(slot.target, output_ids),
            discrete_loss=loss,
        )

    def _decode(self, slots: Sequence[Slot], prompt_ids: Tensor) -> list[Evaluation]:
        targets = [slot.target for slot in slots]
        steps = [slot.step for slot in slots]
        evaluations = evaluate_prompts(self.lm, prompt_ids, targets, steps, self.prompt_bos)
        if self.must_round_trip:
            evaluations = [
                replace(e, is_eligible=round_trips(self.lm, e.prompt_ids, slot.target))
                for slot, e in zip(slots, evaluations, strict=True)
            ]
        for slot, evaluation in zip(slots, evaluations, strict=True):
            slot.forward_tokens += row_tokens(prompt_ids.shape[1], slot.target)
            slot.forward_tokens += decoded_tokens(slot.target, evaluation.output_ids)
        return [
            # A batch rounds differently from a prompt on its own; only the latter solves a target.
            self.decode_alone(slot, evaluation) if evaluation.lcs == 1 else evaluation
            for slot, evaluation in zip(slots, evaluations, strict=True)
        ]
