r"""Gradient estimators: S random rows per position, and what flows back through them.

What an estimator returns goes forward as it is; its backward pass is the estimate. With D a one-hot
draw from :math:`\pi = softmax(Z)`, g Gumbel noise and :math:`J(p) = diag(p) - p p^T`:

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
Gumbel-Rao, Liu et al. 2023 for ReinMax. The first two never hold their rows (`soft_embedding`); the
others do, for a few positions at a time.

Axes: S samples, N positions, V tokens, d width.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlmi.estimators.noise import gumbel_noise
from dlmi.estimators.soft_embedding import sample_columns

EstimatorName = Literal["gumbel_softmax", "straight_through", "gumbel_rao", "reinmax"]

_HELD_ENTRIES = 2**22  # of rows that are held at once: 16 MiB in float32
# A barred token's logit where -inf times its weight of 0 would be nan: low enough to have no weight
# at tau = 200, and finite when it is divided by the square of the smallest tau.
_BARRED = -1e15


def held_embeds(
    estimator: Literal["gumbel_rao", "reinmax"],
    logits: Tensor,
    tau: Tensor,
    matrix: Tensor,
    seed: int,
    samples: int,
    rao_draws: int = 10,
) -> Tensor:
    """Embeddings of S prompts of one slot, whose rows are held for a few positions at a time.

    Z, (N, V), tau, (N,), and an embedding for each token, (V, d), to (S, N, d). `rao_draws` is K,
    the conditional draws of `gumbel_rao`.
    """
    chosen = sample_columns(logits, samples, seed)  # (S, N)
    rows_per_position = samples * rao_draws
    width = max(1, _HELD_ENTRIES // (rows_per_position * logits.shape[1]))

    def embeds(first: int, part: Tensor, part_tau: Tensor) -> Tensor:
        part_chosen = chosen[:, first : first + width]
        if estimator == "reinmax":
            rows = reinmax(part, part_tau, part_chosen)
        else:
            # A stream of its own: the draw above has used the seed's.
            shape = (rows_per_position, *part.shape)
            noise = gumbel_noise(seed + 1, shape, part.device, part.dtype, first)
            noise = noise.view(rao_draws, samples, *part.shape)
            rows = gumbel_rao(part, part_tau, part_chosen, noise)
        return rows @ matrix.to(rows.dtype)

    # The rows are made again in the backward pass; their noise is, too, from its counter.
    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [
        checkpoint(embeds, i, logits[i : i + width], tau[i : i + width], **again)
        for i in range(0, len(logits), width)
    ]
    return torch.cat(parts, dim=1)


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
