r"""The score function: a gradient from losses and log-probabilities alone.

.. math::
    g = \frac{1}{S} \sum_s (L(x^s) - b) \nabla_Z \log p_Z(x^s), \quad x_i \sim softmax(Z_i)

Unbiased for any b that does not depend on the samples (`ema`, `none`), and for one that depends on
the others alone (`rloo`). `as_code` is what the DLMI authors' public code computes instead.

Axes: S samples, N positions, V tokens.
"""

from typing import Literal

import torch
from torch import Tensor

BaselineName = Literal["ema", "rloo", "as_code", "none"]


def sample_log_probs(logits: Tensor, columns: Tensor) -> Tensor:
    """Log-probability of each sampled prompt: (N, V) and (S, N) to (S,), with its graph."""
    log_p = torch.log_softmax(logits, dim=-1)
    # Indexing, not `gather`: its backward pass holds (N, V), not (S, N, V).
    positions = torch.arange(len(log_p), device=log_p.device)
    return log_p[positions, columns].sum(-1)


def moving_average(
    baseline: BaselineName, kept: Tensor | None, newest: Tensor, ema_decay: float = 0.9
) -> tuple[Tensor | None, Tensor]:
    """The average to subtract now, None where there is none yet, and the one to keep.

    From the one that the last call kept and the mean loss of this step's samples, (). `as_code`
    weighs the newest loss by 0.9 and subtracts the average that already contains it; all others
    subtract the average of earlier calls.
    """
    before = newest if kept is None else kept
    if baseline == "as_code":
        after = 0.1 * before + 0.9 * newest
        return after, after
    return kept, ema_decay * before + (1 - ema_decay) * newest


def score_function_surrogate(
    losses: Tensor, log_probs: Tensor, baseline: BaselineName, average: Tensor | None
) -> Tensor:
    """A number whose gradient is the score-function estimate, from (S,) and (S,).

    `average` is the moving average of the loss that `ema` and `as_code` subtract, (). Where `ema`
    has none yet, it compares with the other samples, as `rloo` does: the mean of all samples would
    include each sample's own loss, which makes the estimate too small.
    """
    if baseline == "as_code":
        assert average is not None
        return (losses.mean() - average) * log_probs.mean()
    compares = baseline == "rloo" or (baseline == "ema" and average is None)
    if compares and len(losses) > 1:
        advantage = losses - (losses.sum() - losses) / (len(losses) - 1)
    elif baseline == "ema" and average is not None:
        advantage = losses - average
    else:
        advantage = losses
    return (advantage * log_probs).mean()


def score_function_gradient(
    logits: Tensor, columns: Tensor, losses: Tensor, baseline: BaselineName, average: Tensor | None
) -> Tensor:
    """The estimate itself, (N, V), from prompts (S, N) and their losses (S,)."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        log_probs = sample_log_probs(leaf, columns)
        surrogate = score_function_surrogate(losses, log_probs, baseline, average)
        [gradient] = torch.autograd.grad(surrogate, leaf)
    return gradient
