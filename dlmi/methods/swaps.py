"""What a search by swaps is made of: tokens that are right, their weights, swaps put together.

Axes: C candidates, N prompt tokens, W of them that are searched, K swaps of each, M target tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dlmi.scoring.passes import NO_SWAP

_LATER_WEIGHT = 0.3  # of tokens behind the one after the first mistake


def token_weights(right: int, length: int) -> Tensor:
    """What the tokens of a target weigh after a prompt that gets the first few right, (M,).

    >>> token_weights(1, 5)
    tensor([1.0000, 1.0000, 1.0000, 0.3000, 0.3000])
    """
    weights = torch.full((length,), _LATER_WEIGHT)
    weights[: right + 2] = 1
    return weights


def count_right(output_ids: Tensor, target_ids: Tensor) -> Tensor:
    """Tokens before the first mistake, (C,) of (C, M).

    >>> count_right(torch.tensor([[5, 6, 7], [5, 0, 7]]), torch.tensor([5, 6, 7]))
    tensor([3, 1])
    """
    return (output_ids == target_ids).long().cumprod(-1).sum(-1)


def draw_swaps(
    swaps: Tensor, rarity: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw swaps without replacement, and mark them as tried.

    Args:
        swaps: Tokens that each position may get, (W, K); `NO_SWAP` where there is none any more.
        rarity: Of the swaps at each position, (W,): they are drawn in proportion to 1 / rarity.
        count: How many at most, C.
        generator: Source of the draws.

    Returns:
        Rows of `swaps` and tokens, (C,) each.
    """
    rows, places = (swaps != NO_SWAP).nonzero(as_tuple=True)
    # The smallest of exponential draws, each with a mean of its rarity.
    draws = torch.empty(len(rows)).exponential_(generator=generator)
    chosen = (draws * rarity[rows]).argsort()[:count]
    rows, places = rows[chosen], places[chosen]
    tokens = swaps[rows, places]
    swaps[rows, places] = NO_SWAP
    return rows, tokens


def merge_swaps(
    columns: Tensor,
    swapped: Tensor,
    most: int,
    is_allowed: Callable[[Tensor], bool] = lambda ids: True,
) -> Tensor:
    """Put swaps of one prompt together: the first two, the first three, and so on.

    Args:
        columns: The prompt, (N,).
        swapped: Copies of it with one token changed, the best first, (C, N). Of those that change
            the same position, the first counts.
        most: How many are put together at most.
        is_allowed: Whether a prompt, (N,), may be; a swap that would lead to another is left out.

    Returns:
        One prompt less than swaps that count, (.., N).

    >>> swapped = torch.tensor([[9, 2, 3], [8, 2, 3], [1, 2, 7]])
    >>> merge_swaps(torch.tensor([1, 2, 3]), swapped, most=6)
    tensor([[9, 2, 7]])
    """
    merged = columns.clone()
    merges: list[Tensor] = []
    for candidate in swapped:
        is_new = (candidate != columns) & (merged == columns)
        if is_new.any() and len(merges) < most:
            tried = torch.where(is_new, candidate, merged)
            if is_allowed(tried):
                merged = tried
                merges.append(merged)
    return torch.stack(merges[1:]) if len(merges) > 1 else swapped[:0]
