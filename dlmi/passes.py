"""One pass of many prompts through the LM, with its account of cost.

Each row's loss depends on its own prompt alone, so the gradient is taken right where the loss is
computed, a few rows at a time: the graph of one cut of rows is all that is ever held.

Cost is counted in token passes: a token sent forward through the LM counts 1, and 1 more if a
gradient comes back. Each target pays for its own tokens only, so that what it is charged does not
depend on its batch mates or on padding. A fixed prefix is computed once and costs nothing.

Axes: B slots in flight, S rows per slot, R = B x S rows, N prompt tokens, M target tokens,
V logits, d width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmi.evaluation import bos_prefix, pad_targets
from dlmi.fluency import Fluency, Score
from dlmi.lm import FrozenLM, NextEmbeds
from dlmi.losses import LossName, target_loss
from dlmi.slots import Slot
from dlmi.targets import Target

# Draws what a free run of some of the rows reads next: the rows, a step's logits and its index.
RowNextEmbeds = Callable[[slice, Tensor, int], Tensor]

_HALF_SCALE = 2.0**12  # lifts gradients above the smallest float16 on their way through the LM


@dataclass
class StepLosses:
    """What a method's pass over B slots gives.

    Attributes:
        losses: What is descended, one number per slot with its graph, (B,).
        output_ids: What the pass itself decoded for each slot, (B, M).
        values: The loss to report where `losses` is only its surrogate, (B,).
    """

    losses: Tensor
    output_ids: Tensor
    values: Tensor | None = None


def row_tokens(prompt_length: int, target: Target) -> int:
    """Tokens that the LM reads in one pass over one prompt and its target."""
    return prompt_length + len(target.ids) - 1


def target_pass(
    lm: FrozenLM,
    slots: Sequence[Slot],
    prompt_embeds: Tensor,
    loss: LossName,
    teacher_forcing: bool = True,
    prompt_bos: bool = False,
    next_embeds: RowNextEmbeds | None = None,
    fluency: Fluency | None = None,
) -> tuple[Tensor, Tensor]:
    """Send S prompts of each slot through the LM, and charge the slots for it.

    Args:
        lm: The model.
        slots: B of them.
        prompt_embeds: (B, S, N, d); with `fluency`, products with its matrix.
        loss: Which loss.
        teacher_forcing: Feed the target's own prefix; else run freely.
        prompt_bos: Put BoS before each prompt.
        next_embeds: What a free run reads next; default: the greedy token.
        fluency: A penalty on unlikely prompts, added to the loss of each row.

    Returns:
        The loss of each row, (B, S), and what the pass decoded for it, (B, S, M).
    """
    num_slots, samples, prompt_length = prompt_embeds.shape[:3]
    target_ids, mask = (
        t.repeat_interleave(samples, dim=0)
        for t in pad_targets([slot.target for slot in slots], lm.device)
    )  # (R, M)
    target_length = target_ids.shape[1]
    prefix = bos_prefix(lm) if prompt_bos else None

    def score(embeds: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        if teacher_forcing:
            logits = lm.target_logits(embeds, target_ids[rows], prefix)
        else:
            reads_next = _for_rows(next_embeds, rows)
            logits = lm.free_run(embeds, target_length, reads_next, prefix)
        losses = target_loss(loss, logits, target_ids[rows], mask[rows])
        return losses, logits.detach().argmax(-1)

    tokens = prompt_length + target_length - 1
    final_score = score if fluency is None else fluency.added_to(score, target_length - 1)
    losses, output_ids = _RowLosses.apply(
        prompt_embeds.flatten(0, 1), lm, final_score, tokens, target_length
    )  # type: ignore[no-untyped-call]
    for slot in slots:
        passed = samples * row_tokens(prompt_length, slot.target)
        slot.forward_tokens += passed
        slot.backward_tokens += passed if losses.requires_grad else 0
    return losses.view(num_slots, samples), output_ids.view(num_slots, samples, -1)


def _for_rows(next_embeds: RowNextEmbeds | None, rows: slice) -> NextEmbeds | None:
    if next_embeds is None:
        return None
    return lambda logits, step: next_embeds(rows, logits, step)


class _RowLosses(torch.autograd.Function):
    """Losses of rows; the forward pass already holds their gradients."""

    @staticmethod
    def forward(
        ctx: Any, embeds: Tensor, lm: FrozenLM, score: Score, tokens: int, target_length: int
    ) -> tuple[Tensor, Tensor]:
        wants_gradient: bool = ctx.needs_input_grad[0]
        losses = embeds.new_empty(len(embeds))
        output_ids = torch.empty(
            len(embeds), target_length, dtype=torch.int64, device=embeds.device
        )
        gradients = torch.empty_like(embeds) if wants_gradient else None
        scale = _HALF_SCALE if torch.float16 in (lm.dtype, lm.precision.dtype) else 1.0

        def work(rows: slice) -> None:
            with torch.set_grad_enabled(wants_gradient):
                part = embeds[rows].detach().requires_grad_(wants_gradient)
                row_losses, output_ids[rows] = score(part, rows)
                losses[rows] = row_losses.detach()
                if gradients is not None:
                    [gradient] = torch.autograd.grad(row_losses.sum() * scale, part)
                    gradients[rows] = gradient / scale

        lm.rows_per_pass.run(lm, len(embeds), tokens, target_length, work, wants_gradient)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(output_ids)
        return losses, output_ids

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradients * by_loss[:, None, None], None, None, None, None
