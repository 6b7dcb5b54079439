"""Losses over the logits at the target positions, one number per row.

Axes: R rows, M target positions (rows shorter than M are padded), V logits.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def target_mask(lengths: Tensor, width: int) -> Tensor:
    """True where a padded target has a real token: (R,) lengths to (R, width)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def cross_entropy(logits: Tensor, target_ids: Tensor, mask: Tensor) -> Tensor:
    """Mean negative log-likelihood of each row's own target tokens.

    Args:
        logits: (R, M, V).
        target_ids: (R, M).
        mask: (R, M), True at the positions that count.

    Returns:
        (R,).
    """
    per_token = F.cross_entropy(logits.flatten(0, 1), target_ids.flatten(), reduction="none")
    per_token = per_token.view_as(target_ids)
    return (per_token * mask).sum(-1) / mask.sum(-1)
