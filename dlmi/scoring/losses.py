"""Losses over the logits at the target positions, one number per row.

Axes: R rows, M target positions (rows shorter than M are padded), V logits.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossName = Literal["cross_entropy", "margin", "hinge"]


def target_mask(lengths: Tensor, width: int) -> Tensor:
    """True where a padded target has a real token: (R,) lengths to (R, width)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def target_loss(name: LossName, logits: Tensor, target_ids: Tensor, weights: Tensor) -> Tensor:
    """Mean over each row's own target tokens of a loss per token.

    Args:
        name: `cross_entropy`: -log q(y). `margin`: max log q - log q(y), which is 0 where the
            target is the argmax (SODA). `hinge`: max(0, 1 + best other logit - target logit),
            which goes on until the target leads by a margin of 1.
        logits: (R, M, V).
        target_ids: (R, M).
        weights: How much each position counts, (R, M); or a mask, True at those that count.

    Returns:
        (R,).
    """
    per_token = _PER_TOKEN[name](logits, target_ids)  # (R, M)
    return (per_token * weights).sum(-1) / weights.sum(-1)


def _cross_entropy(logits: Tensor, target_ids: Tensor) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, 1), target_ids.flatten(), reduction="none")
    return flat.view_as(target_ids)


def _margin(logits: Tensor, target_ids: Tensor) -> Tensor:
    # The normaliser of log q cancels.
    return logits.amax(-1) - _target_logits(logits, target_ids)


def _hinge(logits: Tensor, target_ids: Tensor) -> Tensor:
    others = logits.scatter(-1, target_ids[..., None], -torch.inf).amax(-1)
    return F.relu(1 + others - _target_logits(logits, target_ids))


def _target_logits(logits: Tensor, target_ids: Tensor) -> Tensor:
    return logits.gather(-1, target_ids[..., None]).squeeze(-1)


_PER_TOKEN: dict[LossName, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "margin": _margin,
    "hinge": _hinge,
}
