"""The temperature law and the entropy of a relaxed prompt.

Axes: N prompt positions, V tokens a prompt may hold.
"""

import torch
from torch import Tensor

_EPS = 1e-10


def temperature_law(phi: Tensor, tau0: float) -> Tensor:
    """The paper's law, tau = eps + tau0 (1 + tanh phi), which lies between eps and 2 tau0 + eps.

    >>> temperature_law(torch.tensor([0.0]), tau0=100.0)
    tensor([100.])
    """
    return _EPS + tau0 * (1 + torch.tanh(phi))


def annealed_temperature(start: float, end: float, progress: float) -> float:
    """Geometric path from `start` to `end` as `progress` goes from 0 to 1.

    >>> [round(annealed_temperature(100.0, 0.01, p), 6) for p in (0.0, 0.5, 1.0, 2.0)]
    [100.0, 1.0, 0.01, 0.01]
    """
    return float(start * (end / start) ** min(progress, 1.0))


def row_entropy(logits: Tensor, tau: Tensor) -> Tensor:
    """Entropy in nats of each noise-free row softmax(logits / tau): (N, V) to (N,)."""
    entropies: Tensor = torch.special.entr(torch.softmax(logits / tau[..., None], dim=-1))
    return entropies.sum(-1)
