r"""Gumbel noise from a counter: any part of it can be made again, in any order, on any device.

The draw of sample s, position n and column v is a function of (seed, s, n, v) alone. So a backward
pass makes the forward pass's noise again instead of keeping it, all cores share the work, and a
target's noise does not depend on where it runs. One 32-bit word per draw,

.. math::
    x = ((h(v) \oplus a_{sn}) \, m_{sn}), \quad
    w = (x \oplus (x \gg 15)) \, C, \quad
    u = (w \bmod 2^{31} + 1/2) \, 2^{-31}, \quad
    g = -\log(-\log(1 - u)),

with h a full integer hash of the column (made once; no two columns share a word) and (a, m) two
words of a row's 64-bit key, m odd. The large draws come from small u, where floating point is
finest: g reaches 22.

Axes: S samples, N positions, V columns; a row is one (sample, position).
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MULTIPLIER = 0x846CA68B - 2**32  # of the lowbias32 hash, as a signed word
SHIFT = 15
SHIFT_MASK = 0x1FFFF  # what a logical shift of a word by 15 leaves
SIGN_MASK = 0x7FFFFFFF
# Just below 2^-31, so that u stays below 1 after rounding and the noise stays finite.
UNIT = float(np.nextafter(np.float32(2.0**-31), np.float32(0)))


def row_keys(seeds: Sequence[int], samples: int, positions: range, device: torch.device) -> Tensor:
    """Two words for each row of each seed, (2, B*S*N, 1) int32: the mask `a` and the odd `m`.

    They are made on the device, from seeds that kernels get as numbers: nothing is copied there.
    """
    sample = torch.arange(samples, device=device) << 32
    position = torch.arange(positions.start, positions.stop, device=device)
    start = torch.cat([torch.full((1,), _signed(seed), device=device) for seed in seeds])
    key = _mix64((_mix64(start)[:, None, None] + (sample[:, None] | position)).flatten())
    # The lower word; int32 wraps on the way from int64.
    return torch.stack([(key >> 32).int(), (key | 1).int()])[:, :, None]


@functools.lru_cache(maxsize=8)
def column_words(columns: int, device: torch.device) -> Tensor:
    """A hash of each column's number, (V,) int32, all distinct; cached.

    Where hashes collide (the first time at column 140,572), the first column keeps its word and the
    others are hashed again. So a word does not depend on how many columns come after it.
    """
    keys = _mix64(torch.arange(columns))
    while True:
        words = (keys >> 32).int()
        is_first = torch.zeros(columns, dtype=torch.bool)
        is_first[np.unique(words.numpy(), return_index=True)[1]] = True
        if is_first.all():
            return words.to(device)
        keys[~is_first] = _mix64(keys[~is_first])


def minus_gumbel_(
    out: Tensor, words: Tensor, mask: Tensor, multiplier: Tensor, scratch: tuple[Tensor, Tensor]
) -> Tensor:
    """Fill `out`, (rows, columns) of float32 or float64, with -g; no other memory is used.

    `words` are those of the columns, (columns,), `mask` and `multiplier` the keys of the rows,
    (rows, 1), `scratch` two int32 tensors of the shape of `out`.
    """
    word, shifted = scratch
    torch.bitwise_xor(words, mask, out=word)
    word.mul_(multiplier)
    torch.bitwise_right_shift(word, SHIFT, out=shifted)
    shifted.bitwise_and_(SHIFT_MASK)
    word.bitwise_xor_(shifted).mul_(MULTIPLIER).bitwise_and_(SIGN_MASK)
    out.copy_(word).mul_(UNIT).add_(UNIT / 2)  # u
    if out.dtype != torch.float32:
        return out.neg_().log1p_().neg_().log_()
    # The same to the last digit, in half the time: w = 1 - u is rounded, log(w) is fast, and what
    # the rounding lost, u - (1 - w), is put back to first order.
    rest, lost = word.view(torch.float32), shifted.view(torch.float32)
    torch.neg(out, out=rest).add_(1)
    torch.sub(rest, 1, out=lost).add_(out).div_(rest)
    return torch.sub(lost, rest.log_(), out=out).log_()


def gumbel_noise(
    seed: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Independent Gumbel(0, 1) draws of a seed, (S, N, V), from position `first` on."""
    samples, positions, columns = shape
    keys = row_keys([seed], samples, range(first, first + positions), device)
    return noise_of_rows(keys, columns, dtype).view(shape)


def noise_of_rows(keys: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The Gumbel noise of rows, (rows, V), from their keys, (2, rows, 1)."""
    mask, multiplier = keys
    out = torch.empty(len(mask), columns, dtype=dtype, device=keys.device)
    scratch = (torch.empty_like(out, dtype=torch.int32), torch.empty_like(out, dtype=torch.int32))
    words = column_words(columns, keys.device)
    minus_gumbel_(out, words, mask, multiplier, scratch)
    return out.neg_()


def _mix64(words: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, whose products wrap."""
    x = words + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of int64, which itself shifts its sign in."""
    return torch.bitwise_and(words >> bits, 2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of a number modulo 2^64."""
    return (word + 2**63) % 2**64 - 2**63
