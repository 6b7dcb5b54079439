"""One pass of many prompts through the LM, with its account of cost.

Each row's loss depends on its own prompt alone, so the gradient is taken right where the loss is
computed, a few rows at a time: the graph of one cut of rows is all that is ever held.

A prompt that several examples share is read with each of them, and its loss is their mean.

Cost is counted in token passes: a token sent forward through the LM counts 1, and 1 more if a
gradient comes back. Each target pays for its own tokens only, so that what it is charged does not
depend on its batch mates or on padding. A fixed prefix is computed once and costs nothing.

Axes: B slots in flight, S prompts per slot, R rows (B x S, times the examples of each), N prompt
tokens, M target tokens, V logits, d width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlmi.fluency import Fluency, Score
from dlmi.frames import Example
from dlmi.layouts import Rows, lay_out
from dlmi.lm import FrozenLM, NextEmbeds
from dlmi.losses import LossName, target_loss
from dlmi.slots import Slot
from dlmi.targets import Target

# Draws what a free run of some of the rows reads next: the rows, a step's logits and its index.
RowNextEmbeds = Callable[[Rows, Tensor, int], Tensor]

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
    """Tokens that the LM reads in one pass over one prompt, what is around it and its target."""
    return sum(example.paid_tokens(prompt_length) for example in target.readings)


def target_pass(
    lm: FrozenLM,
    slots: Sequence[Slot],
    prompt_embeds: Tensor,
    loss: LossName,
    teacher_forcing: bool = True,
    prompt_bos: bool = False,
    next_embeds: RowNextEmbeds | None = None,
    fluency: Fluency | None = None,
    token_weights: Tensor | None = None,
    targets: Sequence[Target] | None = None,
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
        token_weights: What each token of a slot's one target weighs in its loss, (B, M); default:
            the same.
        targets: What each slot's prompts are read with; default: what its step reads.

    Returns:
        The loss of each row, (B, S), and what the pass decoded for it, (B, S, M).
    """
    num_slots, samples, prompt_length = prompt_embeds.shape[:3]
    targets = targets or [slot.target_at() for slot in slots]
    readings = [target.readings for target in targets for _ in range(samples)]
    examples = [example for of_prompt in readings for example in of_prompt]
    layout = lay_out(lm, examples, prompt_length, prompt_bos)
    target_length = layout.target_ids.shape[1]
    embeds_of_rows = prompt_embeds.flatten(0, 1)
    owners: Tensor | None = None  # whose prompt each row is, (R,); None if each has one row
    if len(examples) > len(readings):
        counts = torch.tensor([len(of_prompt) for of_prompt in readings], device=lm.device)
        owners = torch.arange(len(readings), device=lm.device).repeat_interleave(counts)
        embeds_of_rows = embeds_of_rows[owners]

    def reads_next(rows: Rows) -> NextEmbeds:
        assert next_embeds is not None
        prompts = rows if owners is None else owners[rows]
        return lambda logits, step: next_embeds(prompts, logits, step)

    weights = layout.mask
    if token_weights is not None:
        weights = weights * token_weights.repeat_interleave(samples, dim=0)

    def score(embeds: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        if teacher_forcing:
            logits = layout.forced(lm, embeds, rows)
        else:
            logits = layout.free(lm, embeds, rows, reads_next if next_embeds else None)
        losses = target_loss(loss, logits, layout.target_ids[rows], weights[rows])
        return losses, logits.detach().argmax(-1)

    final_score = score if fluency is None else fluency.added_to(score, target_length - 1)
    losses, output_ids = _RowLosses.apply(
        embeds_of_rows, lm, final_score, layout.tokens, target_length
    )  # type: ignore[no-untyped-call]
    for slot, target in zip(slots, targets, strict=True):
        passed = samples * row_tokens(prompt_length, target)
        slot.forward_tokens += passed
        slot.backward_tokens += passed if losses.requires_grad else 0
    if owners is not None:
        losses = torch.zeros_like(losses[: len(readings)]).index_add(0, owners, losses)
        losses = losses / counts
        output_ids = _side_by_side(output_ids, readings)
    return losses.view(num_slots, samples), output_ids.view(num_slots, samples, -1)


def _side_by_side(output_ids: Tensor, readings: Sequence[Sequence[Example]]) -> Tensor:
    """Outputs of a prompt's examples one after the other, without pad: (R, M) to (B x S, ...)."""
    rows, start = [], 0
    for examples in readings:
        mine = output_ids[start : start + len(examples)]
        start += len(examples)
        rows.append(torch.cat([ids[: len(e.ids)] for ids, e in zip(mine, examples, strict=True)]))
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


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
