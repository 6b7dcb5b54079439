"""Losses of target tokens, from the logits at the positions that predict them.

Axes: V logits; all others are free.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossName = Literal["cross_entropy", "margin", "hinge"]


def token_losses(name: LossName, logits: Tensor, target_ids: Tensor) -> Tensor:
    """The loss of each target token: (..., V) logits and (...) ids to (...).

    Args:
        name: `cross_entropy`: -log q(y). `margin`: max log q - log q(y), which is 0 where the
            target is the argmax (SODA). `hinge`: max(0, 1 + best other logit - target logit),
            which goes on until the target leads by a margin of 1.
        logits: Of the positions that predict the tokens.
        target_ids: The tokens.
    """
    return _PER_TOKEN[name](logits, target_ids)


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
}
