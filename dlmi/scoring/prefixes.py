"""Prefixes whose keys and values are kept, so that the LM reads them once.

A prefix that shares its first tokens with a kept one is read from the first difference on. All new
ones are read in one pass where the LM can pack rows.
"""

from collections.abc import Sequence

import torch

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.packed import PackedLayout, PackedRow
from dlmi.lm.prefix import Layers, Prefix
from dlmi.lm.transfer import Parcel
from dlmi.targets.context import common_beginning

Ids = tuple[int, ...]


class PrefixStore:
    """Keeps the prefixes that were used last.

    Args:
        lm: Reads them.
        size: How many are kept.
    """

    def __init__(self, lm: FrozenLM, size: int) -> None:
        self.lm = lm
        self._size = size
        self._kept: dict[Ids, Prefix] = {}  # the one used last is last

    def read(self, wanted: Sequence[Ids], parcel: Parcel | None = None) -> list[Prefix]:
        """These prefixes, none of them empty; a parcel takes along what the device needs."""
        new: dict[Ids, Prefix | None] = {}  # with what is known of each
        found: dict[Ids, Prefix] = {}
        for ids in wanted:
            known = self._known(ids)
            if known is None or len(known) < len(ids):
                new[ids] = known
            else:
                found[ids] = known
        read = self._read_new(new, parcel or Parcel(self.lm.device)) if new else ()
        for ids, prefix in zip(new, read, strict=True):
            found[ids] = prefix
            self._keep(ids, prefix)
        return [found[ids] for ids in wanted]

    def keep_rest(self, ids: Ids, start: int, layers: Layers) -> None:
        """Keep a prefix whose tokens from `start` on another pass has read.

        `layers` are the keys and values of that pass from there on; it may have read more tokens.
        """
        known = self.read([ids[:start]])[0] if start else None
        count = len(ids) - start
        cut = [(keys[:, :, :count], values[:, :, :count]) for keys, values in layers]
        self._keep(ids, Prefix.joined(known, ids[start:], cut))

    def _keep(self, ids: Ids, prefix: Prefix) -> None:
        self._kept.pop(ids, None)
        self._kept[ids] = prefix
        while len(self._kept) > self._size:
            del self._kept[next(iter(self._kept))]

    def _known(self, ids: Ids) -> Prefix | None:
        """The longest beginning of these ids that is kept."""
        like = max(self._kept, key=lambda kept: len(common_beginning([kept, ids])), default=())
        shared = len(common_beginning([like, ids]))
        if not shared:
            return None
        self._kept[like] = self._kept.pop(like)
        return self._kept[like].shortened(shared)

    @torch.no_grad()
    def _read_new(self, new: dict[Ids, Prefix | None], parcel: Parcel) -> list[Prefix]:
        """Prefixes, after what is known of each: in one pass if the LM can pack rows."""
        lm = self.lm
        rest = [ids[len(known or ()) :] for ids, known in new.items()]
        pairs = list(zip(rest, new.values(), strict=True))
        if not lm.can_pack:
            return [lm.read_prefix(torch.tensor(own, device=lm.device), k) for own, k in pairs]
        before = [known for known in new.values() if known is not None]
        numbers = iter(range(len(before)))
        rows = [
            PackedRow(len(own), 1, 0 if known is None else next(numbers), len(known or ()))
            for own, known in pairs
        ]
        layout = PackedLayout(rows, parcel)
        [flat_ids] = parcel.add(torch.tensor([i for own in rest for i in own]))()
        with lm.precision.set_to(None):  # they may be kept for measurements
            _, layers = lm.packed_logits(lm.embed(flat_ids), layout, before, captures=True)
        return [Prefix.joined(*one) for one in zip(new.values(), rest, layers, strict=True)]
