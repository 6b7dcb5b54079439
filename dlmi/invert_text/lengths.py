"""Searches that start from a prompt of another length, which an earlier search has found."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlmi.methods.base import Method, Search
from dlmi.methods.slot import Slot


def starting_from(method: Method[Any], found: Mapping[str, Sequence[int]]) -> Method[Any]:
    """The same method, from prompts found before, by target id; a relaxation starts anew.

    A shorter prompt is extended by the beginning of the method's own starts. From a longer one,
    tokens are deleted at each place.
    """
    if not isinstance(method, Search):
        return method
    kind: type[Search[Any]] = type(method)

    def starts(self: Search[Any], slot: Slot) -> Tensor:
        own = kind.starts(self, slot)  # (C, N)
        if slot.target.id not in found:
            return own
        prompt_ids = torch.tensor(found[slot.target.id])
        surplus = len(prompt_ids) - slot.length
        if surplus > 0:
            return _deletions(prompt_ids, surplus)
        own[:, -surplus:] = prompt_ids
        return own

    # Of the same name, which result rows have.
    made: Search[Any] = type(kind.__name__, (kind,), {"starts": starts})(**vars(method))
    return made


def _deletions(prompt_ids: Tensor, count: int) -> Tensor:
    """All prompts that lack `count` tokens in a row, (C, N - count)."""
    places = range(len(prompt_ids) - count + 1)
    return torch.stack([torch.cat([prompt_ids[:i], prompt_ids[i + count :]]) for i in places])
