"""Prompts in their contexts, laid out by hand."""

import torch


def by_hand(lm, context, prompt_embeds, target_ids):
    """Logits at the target of one whole prompt: the model itself, no cache, no padding."""
    parts, prompt = [], iter(prompt_embeds)
    parts.append(lm.embed(torch.tensor(context.start_ids, dtype=torch.int64)))
    for piece, size in zip(context.pieces, (*context.sizes(len(prompt_embeds)), 0), strict=True):
        parts.append(lm.embed(torch.tensor(piece, dtype=torch.int64)))
        parts += [next(prompt)[None] for _ in range(size)]
    inputs = torch.cat([*parts, lm.embed(torch.tensor(target_ids[:-1], dtype=torch.int64))])
    logits = lm.model(inputs_embeds=inputs[None]).logits[0, -len(target_ids) :]
    return logits, torch.cat(parts)
