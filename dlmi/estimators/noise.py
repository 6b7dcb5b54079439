r"""Gumbel noise from a counter: any part of it can be made again, in any order, on any device.

The draw of sample s, position n and column v is a function of (seed, s, n, v) alone. So a backward
pass makes the forward pass's noise anew instead of keeping it, all cores share the work, and a
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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]

_WORD = 0xFFFFFFFF
MULTIPLIER = 0x846CA68B - 2**32  # of the lowbias32 hash, as a signed word
SHIFT = 15
SHIFT_MASK = 0x1FFFF  # what a logical shift of a word by 15 leaves
SIGN_MASK = 0x7FFFFFFF
# Just below 2^-31, so that u stays below 1 after rounding and the noise stays finite.
UNIT = float(np.nextafter(np.float32(2.0**-31), np.float32(0)))


def row_keys(seed: int, samples: range, positions: range) -> Tensor:
    """Two words for each row, (2, S*N, 1) int32: the mask `a` and the odd multiplier `m`.

    They are made on the CPU, so that those of many rows go to a device in one copy.
    """
    sample = np.arange(samples.start, samples.stop, dtype=np.uint64)
    position = np.arange(positions.start, positions.stop, dtype=np.uint64)
    counter = ((sample << np.uint64(32))[:, None] | position).flatten()
    start = _mix64(np.array([seed % 2**64], dtype=np.uint64))
    with np.errstate(over="ignore"):
        key = _mix64(start + counter)
    mask = (key >> np.uint64(32)).astype(np.uint32)
    multiplier = (key & np.uint64(_WORD)).astype(np.uint32) | np.uint32(1)
    return torch.from_numpy(np.stack([mask, multiplier]).view(np.int32))[:, :, None]


@functools.lru_cache(maxsize=8)
def column_words(columns: int, device: torch.device) -> Tensor:
    """A hash of each column's number, (V,) int32, all distinct; cached.

    Where hashes collide (the first time at column 140,572), the first column keeps its word and the
    others are hashed again. So a word does not depend on how many columns come after it.
    """
    keys = _mix64(np.arange(columns, dtype=np.uint64))
    while True:
        words = (keys >> np.uint64(32)).astype(np.uint32)
        is_first = np.zeros(columns, dtype=bool)
        is_first[np.unique(words, return_index=True)[1]] = True
        if is_first.all():
            return torch.from_numpy(words.view(np.int32)).to(device)
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
    keys = row_keys(seed, range(samples), range(first, first + positions))
    mask, multiplier = keys.to(device)
    out = torch.empty(samples * positions, columns, dtype=dtype, device=device)
    scratch = (torch.empty_like(out, dtype=torch.int32), torch.empty_like(out, dtype=torch.int32))
    minus_gumbel_(out, column_words(columns, device), mask, multiplier, scratch)
    return out.neg_().view(shape)


def _mix64(words: Words) -> Words:
    """The finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        x: Words = words + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x
