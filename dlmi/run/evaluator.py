"""Decodes the discrete prompts of slots, and charges the slots for it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dlmi.methods.slot import Slot
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import Evaluation, evaluate, mean_lcs, tokens_evaluated
from dlmi.scoring.passes import Cost


class Evaluator:
    """Measures prompts of slots.

    Args:
        engine: Has the LM, and keeps the beginnings of contexts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def evaluate(self, slots: Sequence[Slot], prompts: Sequence[Tensor]) -> None:
        """Record how the slots' prompts, (N,) each, do; one decoded just before is known."""
        ids = [tuple(prompt.tolist()) for prompt in prompts]
        pairs = list(zip(slots, ids, strict=True))
        new = [i for i, (s, own) in enumerate(pairs) if s.last is None or s.last.prompt_ids != own]
        decoded = self._decode([slots[i] for i in new], [prompts[i] for i in new])
        made = dict(zip(new, decoded, strict=True))
        for i, slot in enumerate(slots):
            evaluation = made.get(i)
            if evaluation is None:
                assert slot.last is not None
                evaluation = replace(slot.last, step=slot.step)
            if slot.loss is not None and slot.output_ids is not None:
                evaluation = replace(
                    evaluation,
                    loss=float(slot.loss),
                    as_in_code_lcs=mean_lcs(slot.trained_on, slot.output_ids.tolist()),
                )
            slot.record(evaluation)

    def try_more(self, slot: Slot, prompt_ids: Tensor) -> None:
        """Record the best of further prompts of a slot, (C, N)."""
        made = self._decode([slot] * len(prompt_ids), list(prompt_ids))
        best, before = max(made, key=lambda evaluation: evaluation.score), slot.last
        assert before is not None
        slot.record(replace(best, loss=before.loss, as_in_code_lcs=before.as_in_code_lcs))

    def _decode(self, slots: Sequence[Slot], prompts: Sequence[Tensor]) -> list[Evaluation]:
        if not slots:
            return []
        engine = self._engine
        rows = torch.stack([prompt.to(engine.lm.device) for prompt in prompts])
        targets, steps = [slot.target for slot in slots], [slot.step for slot in slots]
        evaluations = []
        made = evaluate(engine.lm, rows, targets, steps, engine.prefixes)
        for slot, evaluation in zip(slots, made, strict=True):
            once = engine.price_of_prefixes(slot.target.measured, slot.account(float("inf")))
            slot.cost += Cost(once + tokens_evaluated(evaluation, slot.target))
            if slot.tokens.must_round_trip:
                is_eligible = slot.tokens.round_trips(evaluation.prompt_ids)
                evaluation = replace(evaluation, is_eligible=is_eligible)
            evaluations.append(evaluation)
        return evaluations
