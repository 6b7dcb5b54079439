"""Keys and values that are computed once and read by many passes.

The tokens before the first learned token, or before the first token in which candidates differ, are
the same for all rows: their keys and values are computed from one row and shared.
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


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer that begins with what it is given, not with an empty tensor from the host."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values; returns all."""
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class _PassingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer that keeps nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Keys and values as they are."""
        return key_states, value_states


def empty_cache(keeps: bool = True) -> Any:
    """A cache without tokens; one that does not keep any makes a pass as if there were none.

    With a cache, transformers does not look whether position ids are those of packed rows, for
    which the host would have to wait for the device.
    """
    cache = DynamicCache()
    cache.layer_class_to_replicate = _Layer if keeps else _PassingLayer
    return cache


def read_layers(cache: Any) -> Layers | None:
    """The keys and values in a cache; None unless every layer keeps those of all tokens."""
    layers = getattr(cache, "layers", None)
    # A sliding window drops tokens and a recurrent state cannot be cut.
    if not layers or any(type(layer) not in (DynamicLayer, _Layer) for layer in layers):
        return None
    return [(layer.keys, layer.values) for layer in layers]


def make_cache(layers: Layers, length: int, rows: int = -1) -> Any:
    """A new cache of the first `length` tokens; `rows` expands a single row."""
    cache = empty_cache()
    for index, layer in enumerate(layers):
        keys, values = (x[:, :, :length].expand(rows, -1, -1, -1) for x in layer)
        cache.update(keys, values, index)
    return cache


@dataclass(frozen=True)
class Prefix:
    """The keys and values of fixed tokens before the learned ones."""

    length: int  # how many tokens
    layers: Layers  # of these tokens, and perhaps of others after them

    @classmethod
    def joined(cls, known: "Prefix | None", ids: Sequence[int], layers: Layers) -> "Prefix":
        """A known prefix and the tokens after it, with their keys and values."""
        if known is None:
            return cls(len(ids), layers)
        length = known.length
        both = [
            (torch.cat([old_k[:, :, :length], k], 2), torch.cat([old_v[:, :, :length], v], 2))
            for (old_k, old_v), (k, v) in zip(known.layers, layers, strict=True)
        ]
        return cls(length + len(ids), both)

    def __len__(self) -> int:
        return self.length

    def shortened(self, length: int) -> "Prefix":
        """The first `length` tokens; their keys and values are not copied."""
        return Prefix(length, self.layers)
