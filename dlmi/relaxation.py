"""From logits to relaxed one-hot rows: the temperature law, Gumbel noise and straight-through.

Axes: S samples, N prompt positions, V tokens a prompt may hold.
"""

from typing import Any

import torch
from torch import Tensor

TEMPERATURE_EPS = 1e-10


def temperature_law(phi: Tensor, tau0: float, eps: float = TEMPERATURE_EPS) -> Tensor:
    """The paper's law, tau = eps + tau0 (1 + tanh phi), which lies between eps and 2 tau0 + eps.

    >>> temperature_law(torch.tensor([0.0]), tau0=100.0)
    tensor([100.])
    """
    return eps + tau0 * (1 + torch.tanh(phi))


def gumbel_noise(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Independent Gumbel(0, 1) draws, -log of an Exponential(1), on the generator's device."""
    noise = torch.empty(shape, dtype=dtype, device=generator.device)
    # An exponential draw can round to 0, whose logarithm would be infinite.
    return noise.exponential_(generator=generator).clamp_min_(torch.finfo(dtype).tiny).log_().neg_()


def gumbel_softmax(logits: Tensor, tau: Tensor, noise: Tensor) -> Tensor:
    """softmax((logits + noise) / tau) for S samples.

    Args:
        logits: (N, V).
        tau: (N,), or one for all positions, ().
        noise: (S, N, V).

    Returns:
        (S, N, V); every row sums to one.
    """
    return torch.softmax((logits + noise) / tau[..., None], dim=-1)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor) -> Tensor:
        index = probabilities.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, index, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def straight_through(probabilities: Tensor) -> Tensor:
    """One-hot of the largest entry in the forward pass, the identity in the backward pass."""
    one_hot: Tensor = _StraightThrough.apply(probabilities)  # type: ignore[no-untyped-call]
    return one_hot


def row_entropy(logits: Tensor, tau: Tensor) -> Tensor:
    """Entropy in nats of each noise-free row softmax(logits / tau): (N, V) to (N,)."""
    log_p = torch.log_softmax(logits / tau[..., None], dim=-1)
    return -(log_p.exp() * log_p).sum(-1)
