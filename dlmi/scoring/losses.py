"""Losses of target tokens, from the logits at the positions that predict them.

Axes: V logits; all others are free.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossName = Literal["cross_entropy", "margin", "hinge", "mellowmax"]


def token_losses(name: LossName, logits: Tensor, target_ids: Tensor) -> Tensor:
    """The loss of each target token: (..., V) logits and (...) ids to (...).

    `cross_entropy` is -log q(y). `margin` is max log q - log q(y), 0 where the target is the argmax
    (SODA). `hinge` is max(0, 1 + best other logit - target logit), 0 where the target leads by 1.
    `mellowmax` is the negative logit, before the softmax, as in nanoGCG; see `row_losses`.
    """
    if name == "mellowmax":
        return -_target_logits(logits, target_ids)
    if name == "margin":  # the normaliser of log q cancels
        return logits.amax(-1) - _target_logits(logits, target_ids)
    if name == "hinge":
        return F.relu(1 - leads(logits, target_ids))
    losses = F.cross_entropy(logits.flatten(0, -2), target_ids.flatten(), reduction="none")
    return losses.view_as(target_ids)


def row_losses(name: LossName, losses: Tensor, weights: Tensor, rows: Tensor, count: int) -> Tensor:
    """The loss of each of `count` rows: the weighted mean of its tokens', (m,) to (count,).

    `mellowmax` is log mean exp instead, a soft maximum: the worst token counts most. That is
    nanoGCG's with its alpha of 1. `rows` is the row of each token, (m,).

    >>> row_losses("mellowmax", torch.tensor([0.0, 4.0]), torch.ones(2), torch.tensor([0, 0]), 1)
    tensor([3.3250])
    """

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(count).index_add(0, rows, values)

    total = summed(weights)
    if name != "mellowmax":
        return summed(losses * weights) / total
    # The largest of each row is subtracted, so that no power overflows.
    largest = losses.new_zeros(count).scatter_reduce(
        0, rows, losses.detach(), "amax", include_self=False
    )
    powers = (losses - largest[rows]).exp()
    return largest + (summed(powers * weights) / total).log()


def leads(logits: Tensor, target_ids: Tensor) -> Tensor:
    """How far the logit of each target token lies above its best rival's."""
    rivals = logits.scatter(-1, target_ids[..., None], -torch.inf).amax(-1)
    return _target_logits(logits, target_ids) - rivals


def _target_logits(logits: Tensor, target_ids: Tensor) -> Tensor:
    return logits.gather(-1, target_ids[..., None]).squeeze(-1)
