"""One pass of many prompts through the LM, with its account of cost.

Cost is counted in token passes: a token sent forward through the LM counts 1, and 1 more if a
gradient comes back. Each target pays for its own tokens only, so that what it is charged does not
depend on its batch mates or on padding.

Axes: B slots in flight, S rows per slot, N prompt tokens, M target tokens, V logits, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.evaluation import pad_targets
from dlmi.lm import FrozenLM, NextEmbeds
from dlmi.losses import LossName, target_loss
from dlmi.slots import Slot
from dlmi.targets import Target


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


def row_tokens(prompt_length: int, prompt_bos: bool, target: Target) -> int:
    """Tokens that the LM reads in one pass over one prompt and its target."""
    return prompt_length + prompt_bos + len(target.ids) - 1


def soft_embeds(lm: FrozenLM, rows: Tensor) -> Tensor:
    """Relaxed rows times the embedding matrix, (..., V) to (..., d), in float32 or better."""
    # Autocast is for the LM: a bfloat16 product here would round the gradient of Z away.
    with torch.autocast(rows.device.type, enabled=False):
        embeds: Tensor = rows @ lm.prompt_embedding_matrix.to(rows.dtype)
        return embeds


def target_pass(
    lm: FrozenLM,
    slots: Sequence[Slot],
    prompt_embeds: Tensor,
    loss: LossName,
    teacher_forcing: bool = True,
    prompt_bos: bool = False,
    next_embeds: NextEmbeds | None = None,
) -> tuple[Tensor, Tensor]:
    """Send S prompts of each slot through the LM, and charge the slots for it.

    Args:
        lm: The model.
        slots: B of them.
        prompt_embeds: (B, S, N, d).
        loss: Which loss.
        teacher_forcing: Feed the target's own prefix; else run freely.
        prompt_bos: Put BoS before each prompt.
        next_embeds: What a free run reads next; default: the greedy token.

    Returns:
        The loss of each row, (B, S), and what the pass decoded for it, (B, S, M).
    """
    num_slots, samples, prompt_length = prompt_embeds.shape[:3]
    embeds = prompt_embeds.flatten(0, 1)  # (B*S, N, d)
    if prompt_bos:
        bos_embed = lm.embed(torch.tensor(lm.bos_id, device=embeds.device)).to(embeds.dtype)
        embeds = torch.cat([bos_embed.expand(len(embeds), 1, -1), embeds], dim=1)
    target_ids, mask = (
        t.repeat_interleave(samples, dim=0)
        for t in pad_targets([slot.target for slot in slots], lm.device)
    )  # (B*S, M)
    if teacher_forcing:
        logits = lm.target_logits(embeds, target_ids)
    else:
        logits = lm.free_run(embeds, target_ids.shape[1], next_embeds)
    for slot in slots:
        tokens = samples * row_tokens(prompt_length, prompt_bos, slot.target)
        slot.forward_tokens += tokens
        slot.backward_tokens += tokens if logits.requires_grad else 0
    losses = target_loss(loss, logits, target_ids, mask).view(num_slots, samples)
    return losses, logits.detach().argmax(-1).view(num_slots, samples, -1)
