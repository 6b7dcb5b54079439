r"""Prompts that echo a target without holding it: each token is near one of the target's.

.. math::
    x_i \in near_r( y_{j(i)} ), \quad
    near_1(y), near_2(y), ... = \text{other tokens by } \cos( e_v, e_y ), \quad
    P(r) \propto 0.6^r

A causal LM likes to go on with what it has just read. Where a prompt may not hold the target's own
tokens, it can still hold their neighbours: other forms of a word, words like it, marks like it. One
neighbour over and over would be continued by itself; several different ones leave what they have in
common, which is the token in their midst. So the target's neighbours are written down in its order,
as often as they fit, each time others.

This is a start for a search, and a floor beside it: no optimisation has happened yet.

Axes: C prompts, N prompt tokens, M target tokens, R neighbours, V tokens a prompt may hold.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmi.tokens.vocabulary import TargetTokens

_NEIGHBOURS = 8
_NEXT_NEIGHBOUR = 0.6  # how much rarer each neighbour is than the one before it


def echo_prompts(tokens: TargetTokens, length: int, count: int, rng: torch.Generator) -> Tensor:
    """Draw prompts of a target's neighbours.

    Args:
        tokens: What they may hold; the target's own tokens are left out in any case.
        length: Tokens of a prompt, N.
        count: How many prompts, C.
        rng: Source of the draws.

    Returns:
        Token ids, (C, N). The first prompt holds nearest neighbours only.
    """
    near_ids = nearest_ids(tokens, _NEIGHBOURS)  # (M, R)
    copies = math.ceil(length / len(near_ids))
    shape = (count, copies, len(near_ids))
    uniform = torch.rand(shape, generator=rng, device=rng.device).to(near_ids.device)
    ranks = (uniform.log() / math.log(_NEXT_NEIGHBOUR)).clamp(max=near_ids.shape[1] - 1).long()
    ranks[0] = 0
    positions = torch.arange(len(near_ids), device=near_ids.device).expand(shape)
    return near_ids[positions, ranks].flatten(1)[:, -length:]  # ends where the target does


def nearest_ids(tokens: TargetTokens, count: int) -> Tensor:
    """Allowed tokens other than the target's own, by cosine to each of its tokens, (M, R)."""
    allowed = tokens.allowed_columns
    own_ids = torch.tensor(tokens.target.ids, device=allowed.device)
    others = allowed[~torch.isin(tokens.ids(allowed), own_ids)]
    if len(others) == 0:  # the target's own are all there is
        others = allowed
    own_embeds = F.normalize(tokens.lm.embed(own_ids).float(), dim=-1)  # (M, d)
    other_embeds = F.normalize(tokens.vocabulary.matrix[others].float(), dim=-1)
    cosines = own_embeds @ other_embeds.T  # (M, V)
    return tokens.ids(others[cosines.topk(min(count, len(others)), dim=-1).indices])
