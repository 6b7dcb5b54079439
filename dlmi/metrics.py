"""How close an output came to its target, and what the prompt shares with it.

Each measure is a plain function of token ids or log-probabilities; the torchmetrics Metrics below
average it over targets, so that it is right across ranks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


def lcs_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common subsequence.

    >>> lcs_length([1, 2, 3, 4], [2, 4, 3])
    2
    """
    lengths = [0] * (len(second) + 1)
    for a in first:
        diagonal = 0
        for j, b in enumerate(second):
            above = lengths[j + 1]
            lengths[j + 1] = diagonal + 1 if a == b else max(above, lengths[j])
            diagonal = above
    return lengths[-1]


def lcs_members(target_ids: Sequence[int], output_ids: Sequence[int]) -> list[bool]:
    """Which tokens of `output_ids` belong to one longest common subsequence with the target.

    >>> lcs_members([1, 2, 3], [2, 9, 3])
    [True, False, True]
    """
    m, n = len(target_ids), len(output_ids)
    lengths = [[0] * (n + 1) for _ in range(m + 1)]
    for i in range(m):
        for j in range(n):
            lengths[i + 1][j + 1] = (
                lengths[i][j] + 1
                if target_ids[i] == output_ids[j]
                else max(lengths[i][j + 1], lengths[i + 1][j])
            )
    members = [False] * n
    while m and n:
        if target_ids[m - 1] == output_ids[n - 1]:
            members[n - 1] = True
            m, n = m - 1, n - 1
        elif lengths[m - 1][n] >= lengths[m][n - 1]:
            m -= 1
        else:
            n -= 1
    return members


def lcs_ratio(target_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """LCS over the target's length: 1 means that the whole target was said in order.

    >>> lcs_ratio([1, 2, 3, 4], [2, 4, 3])
    0.5
    """
    if not target_ids:
        raise ValueError("Expected `target_ids` to hold at least one token, but it is empty.")
    return lcs_length(target_ids, output_ids) / len(target_ids)


def overlap_ratio(prompt_ids: Sequence[int], target_ids: Sequence[int]) -> float:
    """Share of prompt positions that hold some token of the target.

    >>> overlap_ratio([5, 5, 7, 8], [5, 6])
    0.5
    """
    members = set(target_ids)
    return sum(i in members for i in prompt_ids) / len(prompt_ids)


def target_hit_ratio(prompt_ids: Sequence[int], target_ids: Sequence[int]) -> float:
    """Share of the target's distinct tokens that occur in the prompt.

    >>> target_hit_ratio([5, 5, 7, 8], [5, 6])
    0.5
    """
    members = set(target_ids)
    return len(members & set(prompt_ids)) / len(members)


def perplexity(log_probs: Tensor) -> float:
    """Exp of the mean negative log-likelihood of tokens.

    >>> perplexity(torch.tensor([0.25, 0.25]).log())
    4.0
    """
    return float(log_probs.mean().neg().exp())


class _MeanOverTargets(Metric):
    """Average of one number per target."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def _add(self, value: float) -> None:
        self.total += value
        self.count += 1

    def compute(self) -> Tensor:
        """The average so far."""
        return (self.total / self.count).float()


class LCSRatio(_MeanOverTargets):
    """Mean LCS ratio.

    >>> metric = LCSRatio()
    >>> metric.update([1, 2, 3, 4], [1, 2, 3, 4])
    >>> metric.update([1, 2, 3, 4], [2, 4, 3])
    >>> metric.compute()
    tensor(0.7500)
    """

    def update(self, target_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Add one target and what was said."""
        self._add(lcs_ratio(target_ids, output_ids))


class ExactRate(_MeanOverTargets):
    """Share of targets that were produced token for token.

    >>> metric = ExactRate()
    >>> metric.update([1, 2], [1, 2])
    >>> metric.update([1, 2], [2, 1])
    >>> metric.compute()
    tensor(0.5000)
    """

    def update(self, target_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Add one target and what was said."""
        self._add(float(list(target_ids) == list(output_ids)))


class OverlapRatio(_MeanOverTargets):
    """Mean share of prompt positions that hold some token of the target.

    >>> metric = OverlapRatio()
    >>> metric.update([5, 5, 7, 8], [5, 6])
    >>> metric.update([1, 2], [3])
    >>> metric.compute()
    tensor(0.2500)
    """

    higher_is_better = False

    def update(self, prompt_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Add one prompt and its target."""
        self._add(overlap_ratio(prompt_ids, target_ids))


class TargetHitRatio(_MeanOverTargets):
    """Mean share of a target's distinct tokens that occur in its prompt.

    >>> metric = TargetHitRatio()
    >>> metric.update([5, 7], [5, 6])
    >>> metric.compute()
    tensor(0.5000)
    """

    higher_is_better = False

    def update(self, prompt_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Add one prompt and its target."""
        self._add(target_hit_ratio(prompt_ids, target_ids))


class PromptPerplexity(_MeanOverTargets):
    """Geometric mean of perplexities: that of random tokens spans orders of magnitude.

    >>> metric = PromptPerplexity()
    >>> metric.update(10.0)
    >>> metric.update(1000.0)
    >>> metric.compute()
    tensor(100.)
    """

    higher_is_better = False

    def update(self, prompt_perplexity: float) -> None:
        """Add the perplexity of one prompt."""
        self._add(math.log(prompt_perplexity))

    def compute(self) -> Tensor:
        """The geometric mean so far."""
        return (self.total / self.count).exp().float()
