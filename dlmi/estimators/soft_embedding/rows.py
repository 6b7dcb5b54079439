"""The rows of a soft embedding, in groups that are worked on together.

Few rows make a slow product with E; many rows make a large block. So small slots are grouped, and
the samples of a large slot are split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 1024  # of a group, about: enough for a fast product with E


@dataclass(frozen=True)
class RowGroup:
    """Rows that go through the vocabulary side by side."""

    logits: Sequence[Tensor]  # Z of every slot, (N, V) each; the parts say which are used
    parts: Sequence[tuple[int, range]]  # slots, and the samples of each, whose rows these are
    span: slice  # which of all rows these are
    inverse_tau: Tensor  # 1 / tau of each row, (rows, 1)
    # Mask and multiplier of each row's noise, (2, rows, 1); None without noise
    keys: Tensor | None

    @property
    def rows(self) -> int:
        """How many."""
        return int(self.span.stop - self.span.start)

    @property
    def positions(self) -> int:
        """N."""
        return len(self.logits[0])

    @property
    def columns(self) -> int:
        """V."""
        return self.logits[0].shape[1]

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Each part's slot, and which rows of the group are its own."""
        start = 0
        for slot, samples in self.parts:
            span = slice(start, start + len(samples) * self.positions)
            yield slot, span
            start = span.stop

    def split(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each part's slot, and its share of a tensor (rows, ...) as (samples, N, ...)."""
        for slot, span in self.spans():
            yield slot, rows[span].view(-1, self.positions, *rows.shape[1:])


@dataclass(frozen=True)
class RowSums:
    """What is kept of each row."""

    soft: Tensor  # p E, (rows, d)
    peak: Tensor  # the largest x, (rows, 1)
    total: Tensor  # sum of exp(x - peak), (rows, 1)
    largest: Tensor  # the column of the largest x, (rows,); filled where it is asked for

    @classmethod
    def empty(cls, rows: int, width: int, like: Tensor) -> "RowSums":
        """Uninitialised, for a number of rows."""
        return cls(
            like.new_empty(rows, width),
            like.new_empty(rows, 1),
            like.new_empty(rows, 1),
            torch.empty(rows, dtype=torch.int64, device=like.device),
        )

    def part(self, span: slice) -> "RowSums":
        """Some of the rows, sharing memory."""
        return RowSums(self.soft[span], self.peak[span], self.total[span], self.largest[span])


def row_groups(
    logits: Sequence[Tensor], tau: Tensor, keys: Tensor | None, num_samples: int
) -> Iterator[RowGroup]:
    """All rows, by slot, sample and position, in groups of about a thousand.

    From B tensors Z, (N, V), tau, (B, N), and the noise keys of all rows, (2, B*S*N, 1), or None.
    """
    positions = tau.shape[1]
    start = 0
    for parts in _partition(len(logits), num_samples, positions):
        inverse_tau = torch.cat([tau[i].reciprocal().repeat(len(own)) for i, own in parts])
        span = slice(start, start + len(inverse_tau))
        own_keys = None if keys is None else keys[:, span]
        yield RowGroup(logits, parts, span, inverse_tau[:, None], own_keys)
        start = span.stop


def _partition(
    num_slots: int, num_samples: int, positions: int
) -> Iterator[list[tuple[int, range]]]:
    """The samples of all slots: of several small slots together, of a large slot in pieces."""
    size = min(num_samples, max(1, _ROWS // positions))
    parts = [
        (slot, range(num_samples)[first : first + size])
        for slot in range(num_slots)
        for first in range(0, num_samples, size)
    ]
    count = max(1, _ROWS // (num_samples * positions))
    for first in range(0, len(parts), count):
        yield parts[first : first + count]
