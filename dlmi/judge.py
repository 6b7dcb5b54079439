"""Decodes the discrete prompts of slots, and charges the slots for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmi.evaluation import Evaluation, decoded_tokens, evaluate_prompts, mean_lcs, read_alone
from dlmi.lm import FrozenLM
from dlmi.passes import row_tokens
from dlmi.reasoning import tokens_to_write, write_reasoning
from dlmi.round_trip import round_trips
from dlmi.slots import Slot
from dlmi.targets import Target


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

    def reason(self, slots: Sequence[Slot], prompt_ids: Tensor) -> None:
        """Let the LM write what a step is to read after the slots' prompts, (B, N).

        What it wrote after the same prompt in an earlier step is known. Each slot's is written by
        itself, so that no slot feels its batch mates.
        """
        for slot, row in zip(slots, prompt_ids.tolist(), strict=True):
            if slot.reasoned_ids != tuple(row):
                slot.reasoned_ids, slot.reasoning = tuple(row), {}
            wanted = [e for e in slot.target_at().readings if e.frame.reasoning is not None]
            written = write_reasoning(self.lm, [row] * len(wanted), wanted, self.prompt_bos)
            for example, ids in zip(wanted, written, strict=True):
                slot.reasoning[example.id] = ids
                slot.forward_tokens += tokens_to_write(example, ids, len(row))

    def try_more(self, slot: Slot, prompt_ids: Tensor) -> None:
        """Record the best of further prompts of a slot, (C, N)."""
        candidates = self._decode([slot] * len(prompt_ids), prompt_ids)
        best, before = max(candidates, key=lambda candidate: candidate.score), slot.last
        assert before is not None
        slot.record(replace(best, loss=before.loss, as_in_code_lcs=before.as_in_code_lcs))

    def decode_alone(self, slot: Slot, evaluation: Evaluation) -> Evaluation:
        """The same prompt again, with no batch mates."""
        output_ids, loss, reasoning_ids = read_alone(
            self.lm, evaluation.prompt_ids, slot.target, self.prompt_bos
        )
        return replace(
            evaluation,
            output_ids=output_ids,
            lcs=mean_lcs(slot.target, output_ids),
            discrete_loss=loss,
            reasoning_ids=reasoning_ids,
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
            slot.forward_tokens += _tokens_read(slot.target, evaluation)
            slot.forward_tokens += decoded_tokens(slot.target, evaluation.output_ids)
        return [
            # A batch rounds differently from a prompt on its own; only the latter solves a target.
            self.decode_alone(slot, evaluation) if evaluation.lcs == 1 else evaluation
            for slot, evaluation in zip(slots, evaluations, strict=True)
        ]


def _tokens_read(target: Target, evaluation: Evaluation) -> int:
    """Tokens of the pass over a prompt and its target, and of the reasoning before it."""
    length = len(evaluation.prompt_ids)
    if not evaluation.reasoning_ids:
        return row_tokens(length, target)
    pairs = list(zip(target.readings, evaluation.reasoning_ids, strict=True))
    written = sum(tokens_to_write(example, ids, length) for example, ids in pairs)
    return written + sum(example.after(ids).paid_tokens(length) for example, ids in pairs)
