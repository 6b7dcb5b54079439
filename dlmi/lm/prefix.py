"""Keys and values that are computed once and read by many passes.

What stands before the first learned token, or before the first token that candidates differ in,
is the same for all rows: its keys and values are made from one row and shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Keys and values of each layer, (rows, heads, tokens, head width) each.
Layers = Sequence[tuple[Tensor, Tensor]]


def read_layers(cache: Any) -> Layers | None:
    """The keys and values in a cache; None where a layer keeps something else than all of them."""
    layers = getattr(cache, "layers", None)
    # A sliding window forgets, a recurrent state cannot be cut: such LMs read everything anew.
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return None
    return [(layer.keys, layer.values) for layer in layers]


def make_cache(layers: Layers, length: int, rows: int | None = None) -> Any:
    """A cache of the first `length` tokens, which a pass may add to; one row may serve many."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        count = len(keys) if rows is None else rows
        cache.update(
            keys[:, :, :length].expand(count, -1, -1, -1),
            values[:, :, :length].expand(count, -1, -1, -1),
            index,
        )
    return cache


@dataclass(frozen=True)
class Prefix:
    """Fixed tokens before what is learned."""

    ids: Tensor  # the tokens, (L,)
    # Their keys and values; None where the LM has no cache that can be shared
    layers: Layers | None

    @classmethod
    def joined(cls, known: "Prefix | None", ids: Sequence[int], layers: Layers) -> "Prefix":
        """A known prefix and the tokens after it, with their keys and values."""
        if known is None:
            return cls(torch.tensor(ids), layers)
        assert known.layers is not None
        length = len(known)
        both = [
            (torch.cat([old_k[:, :, :length], k], 2), torch.cat([old_v[:, :, :length], v], 2))
            for (old_k, old_v), (k, v) in zip(known.layers, layers, strict=True)
        ]
        return cls(torch.cat([known.ids, torch.tensor(ids).to(known.ids)]), both)

    def __len__(self) -> int:
        return len(self.ids)

    def shortened(self, length: int) -> "Prefix":
        """Its first tokens."""
        return Prefix(self.ids[:length], self.layers)

    def cache(self, rows: int) -> Any:
        """A fresh cache for a pass of so many rows, or None."""
        return None if self.layers is None else make_cache(self.layers, len(self.ids), rows)
