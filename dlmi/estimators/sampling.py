r"""Gradient estimators: S random rows per position, and what flows back through them.

With D a one-hot draw from :math:`softmax(Z)`, g Gumbel noise and :math:`J(p) = diag(p) - p p^T`:

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
Gumbel-Rao, Liu et al. 2023 for ReinMax. The first two hold no rows (`soft_embedding`).

Axes: S samples, K conditional draws, N positions, V tokens.
"""

from typing import Literal

import torch
from torch import Tensor

EstimatorName = Literal["gumbel_softmax", "straight_through", "gumbel_rao", "reinmax"]

# A barred token's logit where -inf times its weight of 0 would be nan: low enough to have no weight
# at tau = 200, and finite when it is divided by the square of the smallest tau.
_BARRED = -1e15


def gumbel_softmax(logits: Tensor, tau: Tensor, noise: Tensor) -> Tensor:
    """softmax((logits + noise) / tau): (N, V), (N,) and (S, N, V) to (S, N, V)."""
    return torch.softmax((logits + noise) / tau[..., None], dim=-1)


def gumbel_rao(logits: Tensor, tau: Tensor, chosen: Tensor, noise: Tensor) -> Tensor:
    """One-hot of a draw, with the gradient averaged over the noise that could have led to it.

    (N, V), where -inf bars a token, (N,), D as (S, N), and (K, S, N, V) to (S, N, V).
    """
    logits = logits.clamp_min(_BARRED)
    with torch.no_grad():
        perturbed = _conditional_perturbation(logits, chosen, noise)
        shift = perturbed - logits  # constant: the conditional draw itself is not differentiated
    rows = torch.softmax((logits + shift) / tau[..., None], dim=-1).mean(dim=0)  # (S, N, V)
    return with_forward(rows, _one_hot(chosen, rows))


def _conditional_perturbation(logits: Tensor, chosen: Tensor, noise: Tensor) -> Tensor:
    """Logits + Gumbel noise, given that `chosen` has the largest sum: (K, S, N, V)."""
    index = chosen.expand(noise.shape[0], *chosen.shape)[..., None]  # (K, S, N, 1)
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)  # (N, 1)
    maximum = noise.gather(-1, index) + log_total
    others = -torch.logaddexp(-noise - logits, -maximum)
    return others.scatter(-1, index, maximum)


def reinmax(logits: Tensor, tau: Tensor, chosen: Tensor) -> Tensor:
    """One-hot of a draw, with a gradient that is exact to second order (tau >= 1, not learned).

    (N, V), where -inf bars a token, (N,), 1 in the textbook, and D as (S, N) to (S, N, V).
    """
    plain = torch.softmax(logits, dim=-1).expand(*chosen.shape, -1)  # (S, N, V)
    one_hot = _one_hot(chosen, plain)
    with torch.no_grad():
        middle = (torch.softmax(logits / tau[..., None], dim=-1) + one_hot) / 2
        # Zero probabilities stay zero: their logarithm is as small as the dtype has it.
        shift = middle.clamp_min(torch.finfo(middle.dtype).tiny).log() - logits
        shift.masked_fill_(logits.isneginf(), 0)
    midway = torch.softmax(logits + shift, dim=-1)  # its value is `middle`, its Jacobian J(middle)
    return with_forward(2 * midway - plain / 2, one_hot)


def with_forward(surrogate: Tensor, value: Tensor) -> Tensor:
    """`value`, exactly, in the forward pass; the gradient goes to `surrogate` unchanged."""
    return value.detach() + (surrogate - surrogate.detach())  # plus 0


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, index[..., None], 1.0)
