"""Greedy decoding of many texts of different lengths, side by side.

Rows are padded on the left, the padding is masked, and every row counts its positions from its own
first token, so that a row says what it would say alone.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.lm import FrozenLM


def decode_greedily(
    lm: FrozenLM,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: str | None = None,
    batch_size: int = 16,
) -> list[list[int]]:
    """What the LM says after each row of ids, up to its end.

    Args:
        lm: The model.
        rows: Ids of each text, at least one each.
        max_new_tokens: Where to end at the latest.
        stop: A text whose appearance ends a row; it and what follows in its token are left in.
        batch_size: Rows that are decoded side by side; sorted by length, so that few are padded.

    Returns:
        The new ids of each row, without the end-of-sequence token that ended it.
    """
    _check_lengths(lm, rows, max_new_tokens)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    said: list[list[int]] = [[] for _ in rows]
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        decoded = _decode_batch(lm, [rows[row] for row in members], max_new_tokens, stop)
        for row, ids in zip(members, decoded, strict=True):
            said[row] = ids
    return said


def end_ids(lm: FrozenLM) -> set[int]:
    """Tokens that end what the LM says: those of its generation config, and the tokenizer's."""
    config = getattr(lm.model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    listed = ends if isinstance(ends, list) else [ends]
    return {int(i) for i in (*listed, lm.eos_id) if i is not None}


@torch.no_grad()
def _decode_batch(
    lm: FrozenLM, rows: Sequence[Sequence[int]], max_new_tokens: int, stop: str | None
) -> list[list[int]]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=lm.device)
    lengths = torch.tensor([len(row) for row in rows], device=lm.device)
    mask = (torch.arange(width, device=lm.device) >= width - lengths[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    ends = end_ids(lm)
    said: list[list[int]] = [[] for _ in rows]
    members = list(range(len(rows)))  # who is in the batch, and of them who has not ended
    is_open = [True] * len(rows)
    cache: Any = None
    for _ in range(max_new_tokens):
        output = _pass(lm, ids, mask, positions, cache)
        cache = output.past_key_values
        ids = output.logits[:, -1:].argmax(-1)  # (members, 1)
        for row, token_id in zip(members, ids[:, 0].tolist(), strict=True):
            if not is_open[row] or token_id in ends:
                is_open[row] = False
                continue
            said[row].append(token_id)
            is_open[row] = stop is None or stop not in lm.decode(said[row])
        left = [place for place, row in enumerate(members) if is_open[row]]
        if not left:
            break
        mask = torch.cat([mask, mask.new_ones(len(members), 1)], dim=1)
        positions = positions[:, -1:] + 1
        if len(left) <= len(members) // 2 and hasattr(cache, "batch_select_indices"):
            chosen = torch.tensor(left, device=lm.device)
            ids, mask, positions = ids[chosen], mask[chosen], positions[chosen]
            cache.batch_select_indices(chosen)
            members = [members[place] for place in left]
    return said


def _pass(lm: FrozenLM, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
    known = inspect.signature(lm.model.forward).parameters
    options: dict[str, Any] = {}
    if "position_ids" in known:  # others place tokens by what the mask leaves
        options["position_ids"] = positions
    if "logits_to_keep" in known:
        options["logits_to_keep"] = 1
    return lm.model(
        inputs_embeds=lm.embed(ids),
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        **options,
    )


def _check_lengths(lm: FrozenLM, rows: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    for number, row in enumerate(rows):
        if not row:
            raise InputError(f"Expected row {number} to have at least 1 token, but it has none.")
        if lm.max_positions is not None and len(row) + max_new_tokens > lm.max_positions:
            raise InputError(
                f"Expected a question with its template and `max_new_tokens` to be at most "
                f"{lm.max_positions} tokens (the positions of {lm.name}), but question "
                f"{number + 1} has {len(row)} + {max_new_tokens}. Shorten one of them."
            )
