"""The soft embedding of a group of rows with PyTorch alone: on every core, in cached blocks.

The forward pass is an online softmax: the running sum of each row is corrected as larger entries
turn up, so each block is seen once. Every block works in the same few buffers.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlmi.estimators.noise import column_words, minus_gumbel_
from dlmi.estimators.soft_embedding.rows import RowGroup, RowSums
from dlmi.lm.products import product

_LOG2_E = math.log2(math.e)  # entries are kept as binary logarithms: exp2 is faster than exp
_BLOCK = 2**19  # entries of a block: 2 MiB in float32, so that it stays in the cache
_MINIMUM_COLUMNS = 256  # narrower blocks would make the product with E slow


def forward(group: RowGroup, matrix: Tensor, sums: RowSums, hard: bool) -> None:
    """Fill `sums`; `largest` only if `hard`."""
    sums.soft.zero_()
    # Finite, so that subtracting it from a block of barred entries, all -inf, gives no NaN.
    sums.peak.fill_(torch.finfo(sums.peak.dtype).min)
    sums.total.zero_()
    for columns, x in _blocks(group):
        if hard:
            _update_largest(sums.largest, sums.peak, x, columns.start)
        peak = torch.maximum(sums.peak, x.amax(-1, keepdim=True))
        correction = (sums.peak - peak).exp2_()
        sums.peak.copy_(peak)
        weights = x.sub_(peak).exp2_()
        sums.total.mul_(correction).add_(weights.sum(-1, keepdim=True))
        sums.soft.mul_(correction).add_(product(weights, matrix[columns].to(x.dtype)))
    sums.soft.div_(sums.total)


def backward(
    group: RowGroup,
    matrix: Tensor,
    sums: RowSums,
    gradient: Tensor,
    logit_gradients: Sequence[Tensor],
    tau_gradient: Tensor | None,
) -> None:
    """Add the group's share to the gradients of logits, B tensors (N, V), and of tau, (B, N).

    G, (rows, d), is the gradient with respect to the soft embeddings.
    """
    gradient = gradient / sums.total  # so that no block has to be divided
    mean = (gradient * sums.soft).sum(-1, keepdim=True)  # (rows, 1)
    inverse_tau = {slot: rows[0] for slot, rows in group.split(group.inverse_tau)}  # (N, 1) each
    buffer = mean.new_empty(group.rows * _block_columns(group))
    for columns, x in _blocks(group):
        weights = _leading(buffer, group.rows, columns)
        torch.exp2(x.sub_(sums.peak), out=weights)
        by_x = weights.mul_(product(gradient, matrix[columns].to(x.dtype).T).sub_(mean))
        for slot, rows in group.split(by_x):
            logit_gradients[slot][:, columns].addcmul_(rows.sum(0), inverse_tau[slot])
        if tau_gradient is not None:
            # A row of `by_x` sums to zero, so x may be taken from its peak: nothing cancels.
            x.clamp_min_(torch.finfo(x.dtype).min)  # a barred entry: -inf times 0 would be nan
            by_tau = x.mul_(by_x).sum(-1, keepdim=True).mul_(group.inverse_tau / _LOG2_E)
            for slot, rows in group.split(by_tau):
                tau_gradient[slot].sub_(rows.sum((0, 2)))


def largest_columns(group: RowGroup) -> Tensor:
    """The column of each row's largest entry, (rows,)."""
    peak = torch.full_like(group.inverse_tau, -torch.inf)
    largest = torch.zeros(group.rows, dtype=torch.int64, device=peak.device)
    for columns, x in _blocks(group):
        _update_largest(largest, peak, x, columns.start)
        torch.maximum(peak, x.amax(-1, keepdim=True), out=peak)
    return largest


def _update_largest(largest: Tensor, peak: Tensor, x: Tensor, offset: int) -> None:
    """Note the columns of the entries that are larger than all in the blocks before."""
    values, columns = x.max(-1)
    largest.copy_(torch.where(values > peak[:, 0], columns + offset, largest))


def _blocks(group: RowGroup) -> Iterator[tuple[slice, Tensor]]:
    """Walk the vocabulary: columns, and (Z + g) / tau there, in a buffer that is used again."""
    like = group.inverse_tau
    width = _block_columns(group)
    scale = like * _LOG2_E
    words = column_words(group.columns, like.device)
    buffer = like.new_empty(group.rows * width)
    scratch = [torch.empty_like(buffer, dtype=torch.int32) for _ in range(2)]
    for start in range(0, group.columns, width):
        columns = slice(start, min(start + width, group.columns))
        x, word, shifted = (_leading(b, group.rows, columns) for b in (buffer, *scratch))
        if group.keys is None:
            for slot, rows in group.split(x):
                rows.copy_(group.logits[slot][:, columns])
        else:
            minus_gumbel_(x, words[columns], group.keys[0], group.keys[1], (word, shifted))
            for slot, rows in group.split(x):
                torch.sub(group.logits[slot][:, columns], rows, out=rows)
        yield columns, x.mul_(scale)


def _block_columns(group: RowGroup) -> int:
    return max(_MINIMUM_COLUMNS, _BLOCK // group.rows)


def _leading(buffer: Tensor, rows: int, columns: slice) -> Tensor:
    """The first rows x columns entries of a flat buffer; the last block is narrower."""
    width = columns.stop - columns.start
    return buffer[: rows * width].view(rows, width)
