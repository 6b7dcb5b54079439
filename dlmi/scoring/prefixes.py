"""Beginnings of prompts whose keys and values are kept, so that the LM reads them once.

A beginning that shares its first tokens with a kept one is read from the first difference on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.prefix import Prefix
from dlmi.scoring.fluency import reading_states
from dlmi.targets.context import common_beginning


@dataclass(frozen=True)
class KeptPrefix:
    """A beginning as it was read.

    Attributes:
        prefix: Its tokens with their keys and values.
        states: The LM's last hidden states of its tokens, (1, L, h), where those are kept.
    """

    prefix: Prefix
    states: Tensor | None = None

    def shortened(self, length: int) -> "KeptPrefix":
        """Its first tokens."""
        states = None if self.states is None else self.states[:, :length]
        return KeptPrefix(self.prefix.shortened(length), states)


class PrefixStore:
    """Keeps the beginnings that were used last.

    Args:
        lm: Reads them.
        size: How many are kept.
        with_states: Keep hidden states as well.
    """

    def __init__(self, lm: FrozenLM, size: int, with_states: bool = False) -> None:
        self._lm = lm
        self._size = size
        self._with_states = with_states
        self._kept: dict[tuple[int, ...], KeptPrefix] = {}  # the one used last is last
        self._shares: bool | None = None  # not known before something was read

    @property
    def can_share(self) -> bool:
        """Whether the LM has keys and values that can be shared and cut; one token tells."""
        if self._shares is None:
            self._read((int(self._lm.prompt_token_ids[0]),), None)
        return bool(self._shares)

    def read(self, ids: tuple[int, ...]) -> KeptPrefix | None:
        """The beginning `ids`; None where it is empty."""
        if not ids:
            return None
        if self._shares is False:  # each row reads it anew
            return KeptPrefix(Prefix(torch.tensor(ids, device=self._lm.device), None))
        like = max(self._kept, key=lambda kept: len(common_beginning([kept, ids])), default=())
        shared = len(common_beginning([like, ids]))
        if like and shared == len(ids):
            kept = self._kept[like] = self._kept.pop(like)
            return kept.shortened(len(ids))
        known = self._kept[like].shortened(shared) if shared else None
        kept = self._kept[ids] = self._read(ids, known)
        while len(self._kept) > self._size:
            del self._kept[next(iter(self._kept))]
        return kept

    @torch.no_grad()
    def _read(self, ids: tuple[int, ...], known: KeptPrefix | None) -> KeptPrefix:
        lm, start = self._lm, 0 if known is None else len(known.prefix)
        new_ids = torch.tensor(ids[start:], device=lm.device)
        before = None if known is None else known.prefix
        if not self._with_states:
            return self._noted(KeptPrefix(lm.read_prefix(new_ids, before)))
        with reading_states(lm) as seen:
            prefix = lm.read_prefix(new_ids, before)
        states = seen[0][:, -len(new_ids) :]
        if known is not None and known.states is not None:
            states = torch.cat([known.states, states], dim=1)
        return self._noted(KeptPrefix(prefix, states))

    def _noted(self, kept: KeptPrefix) -> KeptPrefix:
        self._shares = kept.prefix.layers is not None
        return kept
