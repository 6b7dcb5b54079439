r"""Gradient estimators: S random rows per position, and what flows back through them.

Each is a pure function of logits, temperatures and a generator. What it returns goes forward as it
is; its backward pass is the estimator. With :math:`\pi = softmax(Z)`, D a one-hot draw from it, g
Gumbel noise and :math:`J(p) = diag(p) - p p^T`:

===================  =======================  =====================================================
name                 forward                  backward, times the incoming gradient
===================  =======================  =====================================================
`gumbel_softmax`     p = softmax((Z+g)/tau)   J(p) / tau
`straight_through`   onehot(argmax(Z+g))      J(p) / tau, at the p of the same noise
`gumbel_rao`         D                        mean over K draws of J(p_k) / tau, with the noise of
                                              p_k drawn given that it chose D
`reinmax`            D                        2 J((softmax(Z/tau) + D) / 2) - J(softmax(Z)) / 2
===================  =======================  =====================================================

Sources: Jang et al. 2017 and Maddison et al. 2017 for the first two, Paulus et al. 2021 for
Gumbel-Rao, Liu et al. 2023 for ReinMax. Axes: S samples, N positions, V tokens.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dlmi.relaxation import exponential_noise, gumbel_noise

EstimatorName = Literal["gumbel_softmax", "straight_through", "gumbel_rao", "reinmax"]


@dataclass(frozen=True)
class RowSampler:
    """Draws rows by one of the estimators.

    Attributes:
        estimator: Which one.
        num_samples: Rows per position, S.
        rao_draws: K, the conditional draws of `gumbel_rao`.
    """

    estimator: EstimatorName
    num_samples: int
    rao_draws: int = 10

    def __call__(self, logits: Tensor, tau: Tensor, generator: torch.Generator) -> Tensor:
        """S rows per position: logits (N, V) and tau (N,) to (S, N, V); each sums to one."""
        shape = (self.num_samples, *logits.shape)
        if self.estimator == "gumbel_softmax":
            return gumbel_softmax(logits, tau, gumbel_noise(shape, generator, logits.dtype))
        if self.estimator == "straight_through":
            return straight_through(logits, tau, gumbel_noise(shape, generator, logits.dtype))
        chosen = sample_tokens(logits, self.num_samples, generator)
        if self.estimator == "gumbel_rao":
            noise = exponential_noise((self.rao_draws, *shape), generator, logits.dtype)
            return gumbel_rao(logits, tau, chosen, noise)
        return reinmax(logits, tau, chosen)


def sample_tokens(logits: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """S independent draws of a column per position from softmax(logits): (N, V) to (S, N)."""
    noise = gumbel_noise((num_samples, *logits.shape), generator, logits.dtype)
    return (logits.detach() + noise).argmax(dim=-1)


def gumbel_softmax(logits: Tensor, tau: Tensor, noise: Tensor) -> Tensor:
    """softmax((logits + noise) / tau): (N, V), (N,) and (S, N, V) to (S, N, V)."""
    return torch.softmax((logits + noise) / tau[..., None], dim=-1)


def straight_through(logits: Tensor, tau: Tensor, noise: Tensor) -> Tensor:
    """One-hot of the perturbed argmax, with the gradient of `gumbel_softmax`."""
    rows = gumbel_softmax(logits, tau, noise)
    return with_forward(rows, _one_hot(rows.argmax(dim=-1), rows))


def gumbel_rao(logits: Tensor, tau: Tensor, chosen: Tensor, noise: Tensor) -> Tensor:
    """One-hot of a draw, with the gradient averaged over the noise that could have led to it.

    Args:
        logits: (N, V).
        tau: (N,).
        chosen: The draw D, (S, N).
        noise: Exponential(1), (K, S, N, V).
    """
    with torch.no_grad():
        perturbed = _conditional_perturbation(logits, chosen, noise)
        shift = perturbed - logits  # constant: the conditional draw itself is not differentiated
    rows = torch.softmax((logits + shift) / tau[..., None], dim=-1).mean(dim=0)  # (S, N, V)
    return with_forward(rows, _one_hot(chosen, rows))


def _conditional_perturbation(logits: Tensor, chosen: Tensor, noise: Tensor) -> Tensor:
    """Logits + Gumbel noise, given that `chosen` has the largest sum: (K, S, N, V)."""
    index = chosen.expand(noise.shape[0], *chosen.shape)[..., None]  # (K, S, N, 1)
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)  # (N, 1)
    log_noise = noise.log()
    minus_maximum = log_noise.gather(-1, index) - log_total
    others = -torch.logaddexp(log_noise - logits, minus_maximum)
    return others.scatter(-1, index, -minus_maximum)


def reinmax(logits: Tensor, tau: Tensor, chosen: Tensor) -> Tensor:
    """One-hot of a draw, with a gradient that is exact to second order (tau >= 1, not learned).

    Args:
        logits: (N, V).
        tau: (N,); 1 is the textbook's.
        chosen: The draw D, (S, N).
    """
    plain = torch.softmax(logits, dim=-1).expand(*chosen.shape, -1)  # (S, N, V)
    one_hot = _one_hot(chosen, plain)
    with torch.no_grad():
        middle = (torch.softmax(logits / tau[..., None], dim=-1) + one_hot) / 2
        # Zero probabilities stay zero: their logarithm is as small as the dtype has it.
        shift = middle.clamp_min(torch.finfo(middle.dtype).tiny).log() - logits
    midway = torch.softmax(logits + shift, dim=-1)  # its value is `middle`, its Jacobian J(middle)
    return with_forward(2 * midway - plain / 2, one_hot)


class _WithForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, surrogate: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def with_forward(surrogate: Tensor, value: Tensor) -> Tensor:
    """`value`, exactly, in the forward pass; the gradient goes to `surrogate` unchanged."""
    result: Tensor = _WithForward.apply(surrogate, value)  # type: ignore[no-untyped-call]
    return result


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, index[..., None], 1.0)
