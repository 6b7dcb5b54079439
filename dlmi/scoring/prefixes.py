"""Beginnings of prompts whose keys and values are kept, so that the LM reads them once.

A beginning that shares its first tokens with a kept one is read from the first difference on, and
all that are new are read in one pass where the LM can pack rows.
"""

from collections.abc import Sequence

import torch

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.packed import PackedRow
from dlmi.lm.prefix import Prefix
from dlmi.targets.context import common_beginning

Ids = tuple[int, ...]


class PrefixStore:
    """Keeps the beginnings that were used last.

    Args:
        lm: Reads them.
        size: How many are kept.
    """

    def __init__(self, lm: FrozenLM, size: int) -> None:
        self._lm = lm
        self._size = size
        self._kept: dict[Ids, Prefix] = {}  # the one used last is last

    def read(self, wanted: Sequence[Ids]) -> list[Prefix]:
        """These beginnings, none of them empty."""
        new: dict[Ids, Prefix | None] = {}  # with what is known of each
        found: dict[Ids, Prefix] = {}
        for ids in wanted:
            known = self._known(ids)
            if known is None or len(known) < len(ids):
                new[ids] = known
            else:
                found[ids] = known
        read = self._read_together if self._lm.can_pack else self._read_one_by_one
        for ids, prefix in zip(new, read(new) if new else (), strict=True):
            found[ids] = prefix
            self.keep(ids, prefix)
        return [found[ids] for ids in wanted]

    def keep(self, ids: Ids, prefix: Prefix) -> None:
        """Keep a beginning that was read elsewhere."""
        self._kept.pop(ids, None)
        self._kept[ids] = prefix
        while len(self._kept) > self._size:
            del self._kept[next(iter(self._kept))]

    def _known(self, ids: Ids) -> Prefix | None:
        """The longest beginning of these that is kept."""
        like = max(self._kept, key=lambda kept: len(common_beginning([kept, ids])), default=())
        shared = len(common_beginning([like, ids]))
        if not shared:
            return None
        self._kept[like] = self._kept.pop(like)
        return self._kept[like].shortened(shared)

    @torch.no_grad()
    def _read_together(self, new: dict[Ids, Prefix | None]) -> list[Prefix]:
        lm = self._lm
        rest = [ids[len(known or ()) :] for ids, known in new.items()]
        before = [known for known in new.values() if known is not None]
        numbers = iter(range(len(before)))
        rows = [
            PackedRow(len(own), 1, 0 if known is None else next(numbers), len(known or ()))
            for own, known in zip(rest, new.values(), strict=True)
        ]
        flat_ids = torch.tensor([i for own in rest for i in own]).to(lm.device)
        with lm.precision.set_to(None):  # they may be kept for measurements
            _, layers = lm.packed_logits(lm.embed(flat_ids), rows, before, captures=True)
        return [
            Prefix.joined(known, own, own_layers)
            for known, own, own_layers in zip(new.values(), rest, layers, strict=True)
        ]

    def _read_one_by_one(self, new: dict[Ids, Prefix | None]) -> list[Prefix]:
        lm = self._lm
        return [
            lm.read_prefix(torch.tensor(ids[len(known or ()) :], device=lm.device), known)
            for ids, known in new.items()
        ]
