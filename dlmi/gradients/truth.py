r"""The true gradient of J, the expected loss of hard prompts: what estimators are measured against.

.. math::
    J(Z) = E_{x \sim \prod_i softmax(Z_i)} L(x), \quad
    \frac{\partial J}{\partial Z_{jv}} = \pi_{jv} (E[L \mid x_j = v] - J)

It is found exactly, or by estimates that are unbiased and know their own noise:

- `exact`: all V^N prompts.
- `conditional`: for chosen logits (j, v), from R prompts x drawn from softmax(Z),
  :math:`\pi_{jv} \frac{1}{R} \sum_r (L(x^r_{-j}, v) - L(x^r))`. The same prompts serve both terms
  and all logits (common random numbers), so what they share cancels.
- `rloo`: the leave-one-out score function on many samples, for all logits.
- `as_in_code`: what the DLMI authors' public code calls the true gradient: five REINFORCE calls of
  a fresh helper, of which the first has advantage 0 and the others 0.1 (L - b), in the batch-mean
  form whose expectation is 1/S of the gradient: (4/5) (1/10) (1/8), 0.01 of the truth at S = 8.

Estimates come in independent blocks, whose differences show the noise of their mean, so that
`statistics` can subtract it. Axes: R prompts, N positions, V tokens, T blocks, P logits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.estimators.score_function import moving_average, sample_log_probs, score_function_gradient
from dlmi.estimators.soft_embedding import sample_columns

# L of discrete prompts, given by columns of Z: (R, N) to (R,).
HardLoss = Callable[[Tensor], Tensor]

TruthName = Literal["exact", "conditional", "rloo", "as_in_code"]

MAX_PROMPTS = 2**16  # that are enumerated
AS_IN_CODE_DRAWS = 5


@dataclass(frozen=True)
class Truth:
    """The gradient that estimators are compared with, and how it was found."""

    kind: TruthName  # how it was found
    samples: int  # prompts that it took
    blocks: Tensor  # independent estimates whose mean it is, (T, P); T = 1: taken as it is
    coordinates: Tensor | None = None  # flattened logits that it knows, (P,); None for all N x V

    def restrict(self, gradients: Tensor) -> Tensor:
        """The logits of gradients that it knows: (K, N V) to (K, P)."""
        return gradients if self.coordinates is None else gradients[:, self.coordinates]


@torch.no_grad()
def sample_prompts(logits: Tensor, count: int, seed: int) -> Tensor:
    """Independent hard prompts from softmax(Z): (N, V) to (count, N).

    In float64 and on the CPU: a cumulative sum over a large vocabulary in float32 would shift the
    probabilities of rare tokens by per cents, and the draws are to be the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(logits.detach().cpu().double(), dim=-1)
    columns = torch.multinomial(probabilities, count, replacement=True, generator=generator)
    return columns.T.contiguous().to(logits.device)


@torch.no_grad()
def exact_truth(loss: HardLoss, logits: Tensor) -> Truth:
    """The gradient over all V^N prompts; `InputError` where they are too many."""
    length, tokens = logits.shape
    if tokens**length > MAX_PROMPTS:
        raise InputError(
            f"Expected at most {MAX_PROMPTS} prompts with `truth: exact`, but {length} positions "
            f"of {tokens} tokens have more. Take `truth: rloo` or `conditional`, or a shorter "
            "prompt."
        )
    numbers = torch.arange(tokens**length, device=logits.device)
    powers = tokens ** torch.arange(length, device=logits.device)
    columns = numbers[:, None] // powers % tokens  # (V^N, N)
    weighted = sample_log_probs(logits, columns).exp() * loss(columns)
    # A_jv, the part of J that prompts with x_j = v make up.
    parts = torch.zeros_like(logits)
    for position in range(length):
        parts[position].index_add_(0, columns[:, position], weighted)
    gradient = parts - torch.softmax(logits, dim=-1) * weighted.sum()
    return Truth("exact", len(columns), gradient.reshape(1, -1))


def choose_coordinates(logits: Tensor, pilots: Iterator[Tensor], count: int, seed: int) -> Tensor:
    """Logits to measure: half where pilot draws are largest, half from softmax(Z), (P,) sorted.

    There is one pilot of each estimator. None may be among the draws that are measured: logits
    chosen for their noise would show that noise as bias.
    """
    count = min(count, logits.numel())
    largest = [pilot.abs().topk(count).indices for pilot in pilots]
    # By rank, so that each estimator gets its share.
    ranked = torch.stack(largest, dim=1).flatten().tolist()
    drawn = sample_prompts(logits, count, seed)  # (P, N)
    positions = torch.arange(len(logits), device=drawn.device)
    random = (positions * logits.shape[1] + drawn).flatten().tolist()
    first = list(dict.fromkeys(ranked))[: count - count // 2]
    chosen = list(dict.fromkeys([*first, *random, *ranked]))[:count]
    return torch.tensor(sorted(chosen), device=logits.device)


@torch.no_grad()
def conditional_truth(
    loss: HardLoss, logits: Tensor, coordinates: Tensor, samples: int, blocks: int, seed: int
) -> Truth:
    """The gradient of chosen logits, (P,) indices into the flattened Z, from R prompts."""
    columns = sample_prompts(logits, samples, seed)  # (R, N)
    losses = loss(columns)  # (R,)
    probabilities = torch.softmax(logits, dim=-1).flatten()[coordinates]  # (P,)
    differences = losses.new_empty(len(coordinates), samples)  # (P, R)
    for row, coordinate in enumerate(coordinates.tolist()):
        position, token = divmod(coordinate, logits.shape[1])
        changed = columns.clone()
        changed[:, position] = token
        # A prompt that holds the token already differs by 0: no pass is needed for it.
        is_new = columns[:, position] != token
        differences[row] = 0
        if is_new.any():
            differences[row, is_new] = loss(changed[is_new]) - losses[is_new]
    means = torch.stack([part.mean(-1) for part in differences.tensor_split(blocks, dim=-1)])
    return Truth("conditional", samples, means * probabilities, coordinates)


def rloo_truth(loss: HardLoss, logits: Tensor, samples: int, seeds: Sequence[int]) -> Truth:
    """The gradient of all logits from many samples, in independent parts of a seed each."""
    gradients, size = [], samples // len(seeds)
    for seed in seeds:
        columns = sample_prompts(logits, size, seed)
        gradient = score_function_gradient(logits, columns, loss(columns), "rloo", None)
        gradients.append(gradient.flatten())
    return Truth("rloo", size * len(seeds), torch.stack(gradients))


def as_in_code_reference(
    loss: HardLoss, logits: Tensor, num_samples: int, seeds: Sequence[int]
) -> Truth:
    """Mean of calls of a fresh helper, a seed each; the first gives 0: see the module's top."""
    total = torch.zeros_like(logits)
    kept: Tensor | None = None
    for seed in seeds:
        columns = sample_columns(logits, num_samples, seed)
        losses = loss(columns)
        average, kept = moving_average("as_code", kept, losses.mean())
        gradient = score_function_gradient(logits, columns, losses, "as_code", average)
        total += gradient / len(seeds)
    return Truth("as_in_code", len(seeds) * num_samples, total.reshape(1, -1))
