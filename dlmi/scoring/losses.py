"""Losses of target tokens, from the logits at the positions that predict them.

Axes: V logits; all others are free.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossName = Literal["cross_entropy", "margin", "hinge", "mellowmax"]


def token_losses(name: LossName, logits: Tensor, target_ids: Tensor) -> Tensor:
    """The loss of each target token: (..., V) logits and (...) ids to (...).

    Args:
        name: `cross_entropy`: -log q(y). `margin`: max log q - log q(y), which is 0 where the
            target is the argmax (SODA). `hinge`: max(0, 1 + best other logit - target logit),
            which goes on until the target leads by a margin of 1. `mellowmax`: the cross-entropy;
            what differs is how the tokens of a row are put together (`row_losses`).
        logits: Of the positions that predict the tokens.
        target_ids: The tokens.
    """
    return _PER_TOKEN[name](logits, target_ids)


def row_losses(name: LossName, losses: Tensor, weights: Tensor, rows: Tensor, count: int) -> Tensor:
    """The loss of each row from those of its tokens, (r,): their weighted mean.

    `mellowmax` is log mean exp instead, a soft maximum: the worst token counts most.

    Args:
        name: Which loss.
        losses: Of the tokens of all rows, (m,).
        weights: Of the same tokens, (m,).
        rows: The row of each token, (m,).
        count: How many rows there are, r.

    >>> row_losses("mellowmax", torch.tensor([0.0, 4.0]), torch.ones(2), torch.tensor([0, 0]), 1)
    tensor([3.3250])
    """

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(count).index_add(0, rows, values)

    total = summed(weights)
    if name != "mellowmax":
        return summed(losses * weights) / total
    # Of each row the largest is taken out, so that no power overflows.
    largest = losses.new_zeros(count).scatter_reduce(0, rows, losses.detach(), "amax")
    powers = (losses - largest[rows]).exp()
    return largest + (summed(powers * weights) / total).log()


def leads(logits: Tensor, target_ids: Tensor) -> Tensor:
    """How far the logit of each target token lies above its best rival's."""
    rivals = logits.scatter(-1, target_ids[..., None], -torch.inf).amax(-1)
    return _target_logits(logits, target_ids) - rivals


def _cross_entropy(logits: Tensor, target_ids: Tensor) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, -2), target_ids.flatten(), reduction="none")
    return flat.view_as(target_ids)


def _margin(logits: Tensor, target_ids: Tensor) -> Tensor:
    # The normaliser of log q cancels.
    return logits.amax(-1) - _target_logits(logits, target_ids)


def _hinge(logits: Tensor, target_ids: Tensor) -> Tensor:
    return F.relu(1 - leads(logits, target_ids))


def _target_logits(logits: Tensor, target_ids: Tensor) -> Tensor:
    return logits.gather(-1, target_ids[..., None]).squeeze(-1)


_PER_TOKEN: dict[LossName, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "margin": _margin,
    "hinge": _hinge,
    "mellowmax": _cross_entropy,
}
