"""The soft embedding of a group of rows with Triton, for CUDA and ROCm.

Noise is drawn again inside each kernel that needs it, and never written. One kernel finds each
row's largest entry and sum, one writes the weights of a block for the product with E, one turns the
product of the backward pass into gradients. The products are PyTorch's. All sums are deterministic.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmi.estimators.noise import MULTIPLIER, SHIFT, SIGN_MASK, UNIT, column_words
from dlmi.estimators.soft_embedding.rows import RowGroup, RowSums

_COLUMNS = 8192  # of a block that is written for a product with E
_TILE = tl.constexpr(1024)  # columns that a program holds at once

_SHIFT = tl.constexpr(SHIFT)
_MULTIPLIER = tl.constexpr(MULTIPLIER % 2**32)
_SIGN_MASK = tl.constexpr(SIGN_MASK)
_UNIT = tl.constexpr(UNIT)
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that a tile of barred entries, all -inf, gives no NaN


@triton.jit  # type: ignore[untyped-decorator]
def _entries(logits, words, keys, scales, positions, count, NOISE: tl.constexpr, row, columns):
    """(Z + g) / tau at some columns of one row, `scales` being 1 / tau; -inf beyond the last."""
    inside = columns < count
    place = logits + (row % positions).to(tl.int64) * count + columns
    entries = tl.load(place, mask=inside, other=-float("inf"))
    if NOISE:
        mask_key = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
        multiplier_key = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        word = tl.load(words + columns, mask=inside, other=0).to(tl.uint32, bitcast=True)
        word = (word ^ mask_key) * multiplier_key
        word = (word ^ (word >> _SHIFT)) * _MULTIPLIER
        uniform = ((word & _SIGN_MASK).to(entries.dtype) + 0.5) * _UNIT
        # -log(1 - u) to the last digit also for small u, as log1p would give it.
        rest = 1.0 - uniform
        lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
        exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost))
        entries -= tl.log(exponential)
    return entries * tl.load(scales + row)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(
    logits, words, keys, scales, positions, count, NOISE: tl.constexpr, peaks, totals, largests
):
    """One program per row: its largest entry, the column of that, and the sum around it."""
    row = tl.program_id(0)
    peak = tl.full((), _LOWEST, peaks.dtype.element_ty)
    total = tl.zeros((), peaks.dtype.element_ty)
    largest = tl.zeros((), tl.int64)
    for start in range(0, count, _TILE):
        columns = start + tl.arange(0, _TILE)
        x = _entries(logits, words, keys, scales, positions, count, NOISE, row, columns)
        highest, where = tl.max(x, 0, return_indices=True)
        largest = tl.where(highest > peak, where.to(tl.int64) + start, largest)
        higher = tl.maximum(peak, highest)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(largests + row, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _weights_kernel(
    logits, words, keys, scales, positions, count, NOISE: tl.constexpr, peaks, weights, first, width
):
    """One program per row and tile: exp(x - peak) at the columns first to first + width."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    columns = first + offsets
    x = _entries(logits, words, keys, scales, positions, count, NOISE, row, columns)
    values = tl.exp(x - tl.load(peaks + row))
    tl.store(weights + row.to(tl.int64) * width + offsets, values, mask=offsets < width)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(
    logits,
    words,
    keys,
    scales,
    positions,
    count,
    NOISE: tl.constexpr,
    peaks,
    means,
    products,
    logit_gradients,
    tau_parts,
    samples,
    first,
    width,
):
    """One program per position and tile: adds up all samples, in order."""
    position = tl.program_id(0)
    tile = tl.program_id(1)
    offsets = tile * _TILE + tl.arange(0, _TILE)
    columns = first + offsets
    inside = offsets < width
    inverse_tau = tl.load(scales + position)
    by_logit = tl.zeros((_TILE,), inverse_tau.dtype)
    by_tau = tl.zeros((_TILE,), inverse_tau.dtype)
    for sample in range(samples):
        row = sample * positions + position
        x = _entries(logits, words, keys, scales, positions, count, NOISE, row, columns)
        x -= tl.load(peaks + row)
        product = tl.load(products + row.to(tl.int64) * width + offsets, mask=inside, other=0.0)
        by_x = tl.where(inside, (product - tl.load(means + row)) * tl.exp(x), 0.0)
        by_logit += by_x
        by_tau += by_x * tl.where(x > _LOWEST, x, 0.0)  # barred: -inf times 0 would be nan
    place = logit_gradients + position.to(tl.int64) * count + columns
    before = tl.load(place, mask=inside, other=0.0)
    tl.store(place, before + by_logit * inverse_tau, mask=inside)
    tl.store(tau_parts + position * tl.num_programs(1) + tile, tl.sum(by_tau, 0) * inverse_tau)


def forward(group: RowGroup, matrix: Tensor, sums: RowSums, hard: bool) -> None:
    """Fill `sums`."""
    rows = _row_arguments(group)
    for span, own in rows:
        results = (sums.peak[span], sums.total[span], sums.largest[span])
        _launch(_sums_kernel, (span.stop - span.start,), *own, *results)
    sums.soft.zero_()
    for first, width in _blocks(group):
        weights = sums.soft.new_empty(group.rows, width)
        for span, own in rows:
            grid = (span.stop - span.start, triton.cdiv(width, _TILE.value))
            _launch(_weights_kernel, grid, *own, sums.peak[span], weights[span], first, width)
        sums.soft.addmm_(weights, matrix[first : first + width].to(weights.dtype))
    sums.soft.div_(sums.total)


def backward(
    group: RowGroup,
    matrix: Tensor,
    sums: RowSums,
    gradient: Tensor,
    logit_gradients: Sequence[Tensor],
    tau_gradient: Tensor | None,
) -> None:
    """Add what the group gives to the gradients; as `plain.backward`."""
    gradient = gradient / sums.total
    means = (gradient * sums.soft).sum(-1, keepdim=True)
    rows = _row_arguments(group)
    for first, width in _blocks(group):
        product = gradient @ matrix[first : first + width].to(gradient.dtype).T
        grid = (group.positions, triton.cdiv(width, _TILE.value))
        for (slot, _), (span, own) in zip(group.spans(), rows, strict=True):
            tau_parts = gradient.new_empty(grid)
            samples = (span.stop - span.start) // group.positions
            of_rows = (sums.peak[span], means[span], product[span])
            results = (logit_gradients[slot], tau_parts)
            _launch(_gradient_kernel, grid, *own, *of_rows, *results, samples, first, width)
            if tau_gradient is not None:
                tau_gradient[slot].sub_(tau_parts.sum(-1))


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Launch a kernel on the device of its first argument; Triton itself takes the current one."""
    # Kernels find an entry by its row and column alone.
    if not all(x.is_contiguous() for x in arguments if isinstance(x, Tensor)):
        raise ValueError("Expected every tensor of a kernel to be contiguous.")
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments)


def _blocks(group: RowGroup) -> list[tuple[int, int]]:
    """First column and width of each block that is written."""
    starts = range(0, group.columns, _COLUMNS)
    return [(first, min(_COLUMNS, group.columns - first)) for first in starts]


def _row_arguments(group: RowGroup) -> list[tuple[slice, tuple[Any, ...]]]:
    """The rows of each slot, and what every kernel reads first of them: see `_entries`."""
    words = column_words(group.columns, group.inverse_tau.device)
    # Without noise no key is read: any tensor will do.
    keys = words.new_empty(group.rows) if group.keys is None else torch.cat([*group.keys], dim=1)
    rest = (group.positions, group.columns, group.keys is not None)
    return [
        (span, (group.logits[slot], words, keys[span], group.inverse_tau[span], *rest))
        for slot, span in group.spans()
    ]
