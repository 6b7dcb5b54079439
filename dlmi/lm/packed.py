"""Rows of any lengths in one pass, without padding, after prefixes whose keys are kept.

The rows are concatenated into a single sequence, so norms, projections, MLPs and the head see real
tokens only. Attention alone is laid out as (prefixes, rows, tokens): each query reads the keys of
its row's prefix, which all rows after it share without copies, up to the tokens that the row has in
common with it, and then its own row, causally. One softmax covers both. Padding is on the right,
where no query of a real token reads. Off the CPU all sizes are rounded up to a few, with padding
that nothing real reads, so that a compiler or a recorded graph sees few shapes.

The attention function is registered with transformers' `AttentionInterface` and named in the
model's config for the duration of a pass. Gradients go through it.

Axes: B prefixes, C rows after one, T tokens of a row, L packed tokens, W tokens of a prefix, K key
heads, G query heads of a key head, h head width, V logits.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from dlmi.lm.prefix import Layers, Prefix
from dlmi.lm.transfer import Parcel

_NAME = "dlmi_packed"


@dataclass(frozen=True)
class PackedRow:
    """The layout of a row."""

    length: int  # tokens of the row
    keep: int  # how many of the last ones get logits
    prefix: int = 0  # number of the prefix before it
    shared: int = 0  # how many first tokens of that prefix it reads


def rounded_up(size: int) -> int:
    """The next of a few sizes: four between a power of two and its double.

    >>> [rounded_up(size) for size in (0, 1, 7, 9, 17, 100, 129)]
    [0, 1, 7, 10, 20, 112, 160]
    """
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


class PackedLayout:
    """The layout of concatenated rows, made on the host; a parcel takes it to the device."""

    def __init__(self, rows: Sequence[PackedRow], parcel: Parcel) -> None:
        fit = (lambda size: size) if parcel.device.type == "cpu" else rounded_up
        lengths, keep, prefix, shared = torch.tensor(
            [(row.length, row.keep, row.prefix, row.shared) for row in rows]
        ).T
        self.lengths: list[int] = lengths.tolist()
        self.width = fit(int(shared.max()))  # tokens of a prefix with padding, W
        counts = prefix.bincount(minlength=1)
        size = (fit(len(counts)), fit(int(counts.max())), fit(int(lengths.max())))
        order = prefix.argsort(stable=True)
        column = torch.empty_like(prefix)
        column[order] = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[prefix[order]]
        start = lengths.cumsum(0) - lengths
        within = torch.arange(int(lengths.sum())) - start.repeat_interleave(lengths)
        place = (prefix * size[1] + column) * size[2]  # of a row's first token in the layout
        padded = torch.zeros(size, dtype=torch.long)
        tokens = torch.minimum(torch.arange(size[2]), lengths[:, None] - 1)
        padded[prefix, column] = start[:, None] + tokens
        seen = torch.zeros(size[:2], dtype=torch.long)
        seen[prefix, column] = shared
        ends = (start + lengths - keep.cumsum(0)).repeat_interleave(keep)
        self.size = size  # B, C and T, with padding
        self.tokens = fit(len(within))  # packed, with padding, L
        self.num_kept = len(ends)  # positions with logits, without padding
        # Whether packed tokens and layout are in the same order
        self.is_even = self.tokens == padded.numel() and torch.equal(place, start)
        more, more_kept = (0, self.tokens - len(within)), (0, fit(len(ends)) - len(ends))
        self.arrived = parcel.add(
            F.pad(shared.repeat_interleave(lengths) + within, more),  # position ids, (L,)
            F.pad(place.repeat_interleave(lengths) + within, more),  # layout to packed, (L,)
            F.pad(ends + torch.arange(len(ends)), more_kept),  # positions with logits
            padded.flatten(),  # packed to layout, (B * C * T,)
            seen,  # prefix tokens that each row reads, (B, C)
        )


class PackedPass:
    """One pass, made once for all layers; it can capture the keys and values of its rows."""

    def __init__(
        self, layout: PackedLayout, prefixes: Sequence[Layers], captures: bool = False
    ) -> None:
        self._layout = layout
        self._captured: list[tuple[Tensor, Tensor]] | None = [] if captures else None
        self._prefixes = prefixes
        self._width = layout.width
        self._size = size = layout.size
        positions, self._unpad, self.kept, self._pad, seen = layout.arrived()
        device = positions.device
        self.position_ids = positions[None]
        # Keys that a query may not read, (B, 1, C, 1, T, W + T)
        ones = torch.ones(size[2], size[2], dtype=torch.bool, device=device)
        before = torch.arange(self._width, device=device) >= seen.view(*size[:2], 1, 1)
        hidden = before.expand(*size, -1), ones.triu(1).expand(*size, -1)
        self._hidden = torch.cat(hidden, dim=-1)[:, None, :, None]

    def _known(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all prefixes, (B, K, W, h), padded if there are several."""
        pairs = [prefix[layer] for prefix in self._prefixes]
        if len(pairs) == 1:
            keys, values = (x[:, :, : self._width] for x in pairs[0])
        else:
            keys, values = (
                pad_sequence([x[0, :, : self._width].transpose(0, 1) for x in both], True)
                .permute(0, 2, 1, 3)
                .contiguous()
                for both in zip(*pairs, strict=True)
            )
        missing = (0, 0, 0, self._width - keys.shape[2], 0, 0, 0, self._size[0] - len(keys))
        if any(missing):
            keys, values = F.pad(keys, missing), F.pad(values, missing)
        return keys.to(like.dtype), values.to(like.dtype)

    def _laid_out(self, packed: Tensor) -> Tensor:
        """(1, H, L, h) to (B, C, T, H, h)."""
        rows = packed[0].transpose(0, 1)
        if not self._layout.is_even:
            rows = rows.index_select(0, self._pad)
        return rows.reshape(*self._size, *rows.shape[1:])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float | None
    ) -> Tensor:
        """(1, K * G, L, h) and twice (1, K, L, h) to (1, L, K * G, h)."""
        (b, c, t), heads, groups = self._size, key.shape[1], query.shape[1] // key.shape[1]
        if self._captured is not None:
            self._captured.append((key.detach(), value.detach()))
        query = self._laid_out(query * scale).view(b, c, t, heads, groups, -1)
        query = query.permute(0, 3, 1, 4, 2, 5).reshape(b, heads, c, groups * t, -1)
        key, value = (self._laid_out(x).permute(0, 3, 1, 2, 4) for x in (key, value))
        scores = query @ key.transpose(-1, -2)  # (B, K, C, G * T, T)
        if self._width:
            known_keys, known_values = self._known(layer, key)
            before = query.flatten(2, 3) @ known_keys.transpose(-1, -2)
            scores = torch.cat([before.view(b, heads, c, groups * t, -1), scores], dim=-1)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.view(b, heads, c, groups, t, -1).masked_fill_(self._hidden, -torch.inf)
        weights = scores.softmax(-1).view(b, heads, c, groups * t, -1).to(value.dtype)
        mixed = weights[..., self._width :] @ value
        if self._width:
            before = weights[..., : self._width].flatten(2, 3) @ known_values
            mixed = mixed + before.view_as(mixed)
        mixed = mixed.view(b, heads, c, groups, t, -1).permute(0, 2, 4, 1, 3, 5)
        mixed = mixed.reshape(b * c * t, heads * groups, -1)
        return (mixed if self._layout.is_even else mixed.index_select(0, self._unpad))[None]

    def captured(self) -> list[Layers]:
        """Keys and values of each row, (1, K, T, h), after a pass that captures them."""
        if self._captured is None:
            return []
        lengths = self._layout.lengths
        sizes = [*lengths, self._layout.tokens - sum(lengths)]  # the last is padding
        by_layer = [(torch.split(k, sizes, 2), torch.split(v, sizes, 2)) for k, v in self._captured]
        return [[(k[row], v[row]) for k, v in by_layer] for row in range(len(lengths))]


_running: ContextVar[PackedPass | None] = ContextVar("running", default=None)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    now = _running.get()
    assert now is not None
    if options.get("sliding_window") or options.get("s_aux") is not None:
        raise NotImplementedError("A sliding window or an attention sink.")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return now.attend(module.layer_idx, query, key, value, scale, options.get("softcap")), None


AttentionInterface.register(_NAME, _attention)  # there is no mask of this name: none is built


@contextlib.contextmanager
def packed_attention(model: Any, now: PackedPass) -> Iterator[None]:
    """Use the attention of a packed pass within the context."""
    config = model.config.get_text_config()
    usual, token = config._attn_implementation, _running.set(now)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _running.reset(token)


@torch.no_grad()
def packs_right(lm: Any, embeds: Tensor) -> bool:
    """Whether a `FrozenLM` gives packed rows after a shared prefix the logits of plain rows.

    It does not where attention bypasses transformers' interface, has a window or a sink, or where
    a state is passed on from token to token. Tried on the embeddings of nine tokens, (9, d).
    """
    prefix, rows = embeds[:4], [(4, embeds[4:]), (2, embeds[5:7])]
    parcel = Parcel(lm.device)
    alone = PackedLayout([PackedRow(4, 1)], parcel)
    laid_out = PackedLayout([PackedRow(len(own), 1, shared=n) for n, own in rows], parcel)
    try:
        _, [layers] = lm.packed_logits(prefix, alone, captures=True)
        known = [Prefix(4, layers)]
        packed, _ = lm.packed_logits(torch.cat([own for _, own in rows]), laid_out, known)
    except (NotImplementedError, TypeError, ValueError, RuntimeError, AttributeError):
        return False
    wholes = [torch.cat([prefix[:shared], own]) for shared, own in rows]
    plain = torch.cat([lm.last_logits(whole[None], 1)[0] for whole in wholes])
    return bool((packed - plain).abs().max() <= 0.02 * plain.abs().max().clamp_min(1e-6))
