"""Greedy texts of different lengths, side by side, by `transformers`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from dlmi.errors import InputError


def replace_config(model: Any, eos_id: int | None) -> list[int]:
    """Replace a model's generation config by a plain one; returns the tokens that end its texts.

    `generate` takes defaults from it: a shipped repetition penalty would change what is generated.
    """
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    listed = [*(ends if isinstance(ends, list) else [ends]), eos_id]
    end_ids = sorted({int(i) for i in listed if i is not None})
    if config is not None:
        model.generation_config = GenerationConfig(eos_token_id=end_ids or None)  # type: ignore[no-untyped-call]
    return end_ids


@torch.no_grad()
def generate(
    lm: Any,
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    stop: str | None = None,
    batch_size: int = 16,
) -> list[list[int]]:
    """Greedy continuations of rows of ids by a `FrozenLM`, without the token that ends a text.

    `stop` is a text that ends a continuation; the token that completes it is kept.
    """
    for number, ids in enumerate(rows, start=1):
        if not ids:
            raise InputError(f"Expected text {number} to have at least 1 token, but it has none.")
        if lm.max_positions is not None and len(ids) + max_tokens > lm.max_positions:
            raise InputError(
                f"Expected a text and its continuation to have at most {lm.max_positions} tokens "
                f"(the positions of {lm.name}), but text {number} has {len(ids)} + {max_tokens}."
            )
    pad_id = lm.end_ids[0] if lm.end_ids else 0
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=lm.end_ids or None,
        pad_token_id=pad_id,
    )

    def is_complete(ids: list[int]) -> bool:
        return stop is not None and stop in lm.decode(ids)

    def cut(ids: list[int]) -> list[int]:
        for count, token_id in enumerate(ids):
            if token_id in lm.end_ids:
                return ids[:count]
            if is_complete(ids[: count + 1]):
                return ids[: count + 1]
        return ids

    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # so that few are padded
    continuations: list[list[int]] = [[] for _ in rows]
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        texts = [torch.tensor(rows[row], device=lm.device) for row in members]
        masks = [torch.ones_like(text) for text in texts]
        width = len(texts[-1])  # the longest, as they are sorted

        def are_complete(ids: Tensor, scores: Any, width: int = width, **_: Any) -> Tensor:
            done = [is_complete(new_ids) for new_ids in ids[:, width:].tolist()]
            return torch.tensor(done, device=ids.device)

        with torch.autocast(lm.device.type, enabled=False):  # in the LM's own dtype
            output_ids = lm.model.generate(
                input_ids=pad_sequence(texts, True, pad_id, "left"),
                attention_mask=pad_sequence(masks, True, 0, "left"),
                stopping_criteria=[are_complete],
                generation_config=config,
            )
        for row, new_ids in zip(members, output_ids[:, width:].tolist(), strict=True):
            continuations[row] = cut(new_ids)
    return continuations
