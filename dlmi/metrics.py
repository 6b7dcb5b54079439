"""Measures of outputs and prompts, as functions of token ids or log-probabilities."""

import math
import statistics
from collections.abc import Sequence


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
    """Length of the LCS over that of the target; 1 if all of the target is there, in order.

    >>> lcs_ratio([1, 2, 3, 4], [2, 4, 3])
    0.5
    """
    return sum(lcs_members(target_ids, output_ids)) / len(target_ids)


def overlap_ratio(prompt_ids: Sequence[int], target_ids: Sequence[int]) -> float:
    """Share of prompt positions with a token of the target.

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


def perplexity(log_probs: Sequence[float]) -> float:
    """Exp of the mean negative log-likelihood of tokens.

    >>> round(perplexity([math.log(0.25), math.log(0.25)]), 9)
    4.0
    """
    try:
        return math.exp(-statistics.fmean(log_probs))
    except OverflowError:
        return math.inf
