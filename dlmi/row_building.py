"""From a slot that is done with to its result row."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlmi.evaluation import pasted_lcs, read_alone
from dlmi.frames import NO_FRAME
from dlmi.lm import FrozenLM
from dlmi.metrics import lcs_ratio, overlap_ratio, target_hit_ratio
from dlmi.prompt_forms import LCSMatrix, Relaxation, measure_forms
from dlmi.results import Inversion, ReadExample
from dlmi.round_trip import round_trips
from dlmi.slots import Slot
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary


def build_row(
    vocabulary: Vocabulary,
    slot: Slot,
    stop_reason: str,
    *,
    last_ids: Tensor,
    relaxation: Relaxation | None,
    seed: int,
    method: str,
    settings: dict[str, Any],
    environment: dict[str, Any],
) -> Inversion:
    """The row of a slot that is done with: its best prompt, how it fared and where it ran.

    Args:
        vocabulary: The LM, and what its prompts may hold.
        slot: With its best prompt decoded alone.
        stop_reason: Why it is done with.
        last_ids: The discrete prompt that it stands for now, (N,).
        relaxation: The distributions that it stands for now.
        seed: Of the run.
        method: Class of the inverter.
        settings: Its arguments.
        environment: The columns that say where it was measured, and on which targets.
    """
    lm, target, best, last = vocabulary.lm, slot.target, slot.best, slot.last
    assert best is not None
    assert last is not None
    prompt_text = lm.decode(best.prompt_ids)
    prompt_bos = bool(settings["prompt_bos"])
    frame = None if target.frame == NO_FRAME else target.frame
    full_ids = () if frame is None else frame.full_ids(best.prompt_ids)
    matrix: LCSMatrix = {}
    rank_one_rate = None
    held_out: tuple[ReadExample, ...] = ()
    if stop_reason in ("solved", "budget"):  # whoever presses Ctrl-C waits for this
        best_ids = torch.tensor(best.prompt_ids, device=lm.device)
        matrix, rank_one_rate = measure_forms(
            vocabulary, slot, best_ids, last_ids, relaxation, prompt_bos
        )
        if target.shared is not None and target.shared.held_out:
            others = target.with_examples(target.shared.held_out)
            output_ids, _, written = read_alone(lm, best.prompt_ids, others, prompt_bos)
            held_out = _read(lm, best.prompt_ids, others, output_ids, written)
    return Inversion(
        target_id=target.id,
        k=target.k,
        target_text=target.text,
        target_ids=target.ids,
        prompt_text=prompt_text,
        prompt_ids=best.prompt_ids,
        output_text=lm.decode(best.output_ids),
        output_ids=best.output_ids,
        lcs=best.lcs,
        as_in_code_lcs=last.as_in_code_lcs,
        exact=best.output_ids == target.ids,
        round_trips=round_trips(lm, best.prompt_ids, target),
        round_trip_lcs=pasted_lcs(lm, best.prompt_ids, target, prompt_bos),
        prompt_perplexity=lm.perplexity(best.prompt_ids),
        overlap_ratio=overlap_ratio(best.prompt_ids, target.ids),
        target_hit_ratio=target_hit_ratio(best.prompt_ids, target.ids),
        loss=best.loss,
        discrete_loss=best.discrete_loss,
        best_step=best.step,
        steps=slot.step,
        stop_reason=stop_reason,
        failure=slot.failure,
        seconds=slot.seconds,
        forward_tokens=slot.forward_tokens,
        backward_tokens=slot.backward_tokens,
        seed=seed,
        method=method,
        settings=settings,
        trace=tuple(slot.trace),
        prompt_tokens=_token_texts(lm, best.prompt_ids),
        target_tokens=_token_texts(lm, target.ids),
        output_tokens=_token_texts(lm, best.output_ids),
        lcs_matrix=matrix,
        rank_one_rate=rank_one_rate,
        diagnostics={name: tuple(v.tolist()) for name, v in slot.diagnostics.items()},
        frame=frame,
        full_ids=full_ids,
        full_text=lm.decode(full_ids) if full_ids else "",
        examples=_read(lm, best.prompt_ids, target, best.output_ids, best.reasoning_ids)
        if target.examples
        else (),
        held_out=held_out,
        **environment,
    )


def _token_texts(lm: FrozenLM, ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(lm.decode([token_id]) for token_id in ids)


def _read(
    lm: FrozenLM,
    prompt_ids: tuple[int, ...],
    target: Target,
    output_ids: Sequence[int],
    reasoning_ids: tuple[tuple[int, ...], ...],
) -> tuple[ReadExample, ...]:
    """How a prompt did on each example of a target, from what the LM said to all of them."""
    written = reasoning_ids or ((),) * len(target.readings)
    return tuple(
        ReadExample(
            id=example.id,
            ids=example.ids,
            text=example.text,
            frame=example.frame,
            full_text=lm.decode(example.frame.full_ids(prompt_ids)),
            output_ids=said_ids,
            output_text=lm.decode(said_ids),
            lcs=lcs_ratio(example.ids, said_ids),
            exact=said_ids == example.ids,
            reasoning_ids=before,
            reasoning_text=lm.decode(before) if before else "",
        )
        for example, said_ids, before in zip(
            target.readings, target.split(output_ids), written, strict=True
        )
    )
