"""Greedy texts of different lengths, side by side, by `transformers`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from dlmi.errors import InputError


def replace_config(model: Any, eos_id: int | None) -> list[int]:
    """Take out the settings that a model comes with; gives the tokens that end its texts.

    `generate` fills in from there what is not said: a shipped repetition penalty would leak in.
    """
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    listed = [*(ends if isinstance(ends, list) else [ends]), eos_id]
    end_ids = sorted({int(i) for i in listed if i is not None})
    if config is not None:
        model.generation_config = GenerationConfig(eos_token_id=end_ids or None)  # type: ignore[no-untyped-call]
    return end_ids


def check_lengths(
    rows: Sequence[Sequence[int]], max_tokens: int, max_positions: int | None, name: str
) -> None:
    """Raise `InputError` for a row without tokens, or one that leaves too few positions."""
    for number, row in enumerate(rows, start=1):
        if not row:
            raise InputError(f"Expected text {number} to have at least 1 token, but it has none.")
        if max_positions is not None and len(row) + max_tokens > max_positions:
            raise InputError(
                "Expected a text and what the LM may write after it to have at most "
                f"{max_positions} tokens (the positions of {name}), but text {number} has "
                f"{len(row)} + {max_tokens}. Shorten one of them."
            )


@torch.no_grad()
def generate(
    model: Any,
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    end_ids: Sequence[int],
    is_complete: Callable[[list[int]], bool] | None,
    batch_size: int,
) -> list[list[int]]:
    """What a model says greedily after each row of ids; see `FrozenLM.generate`.

    `end_ids` end a text and are left out. `is_complete` tells whether the new ids of a row are
    enough; the last of them is kept.
    """
    device = model.get_input_embeddings().weight.device
    pad_id = end_ids[0] if end_ids else 0
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=list(end_ids) or None,
        pad_token_id=pad_id,
    )

    def kept(ids: list[int]) -> list[int]:
        for count, token_id in enumerate(ids):
            if token_id in end_ids:
                return ids[:count]
            if is_complete is not None and is_complete(ids[: count + 1]):
                return ids[: count + 1]
        return ids

    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    said: list[list[int]] = [[] for _ in rows]
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        texts = [torch.tensor(rows[row], device=device) for row in members]
        masks = [torch.ones_like(text) for text in texts]
        width = max(map(len, texts))

        def are_complete(ids: Tensor, scores: Any, width: int = width, **_: Any) -> Tensor:
            assert is_complete is not None
            done = [is_complete(new_ids) for new_ids in ids[:, width:].tolist()]
            return torch.tensor(done, device=ids.device)

        output_ids = model.generate(
            input_ids=pad_sequence(texts, True, pad_id, "left"),
            attention_mask=pad_sequence(masks, True, 0, "left"),
            stopping_criteria=[] if is_complete is None else [are_complete],
            generation_config=config,
        )
        for row, new_ids in zip(members, output_ids[:, width:].tolist(), strict=True):
            said[row] = kept(new_ids)
    return said
