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
        Token ids, (C, N). The first prompt holds nearest neighbours only. Where prompts must
        round-trip, they do: tokens that merge are replaced by other neighbours.
    """
    cosines = _cosines(tokens)  # (M, V)
    usable = int(cosines[0].isfinite().sum())
    near_ids = tokens.ids(cosines.topk(min(_NEIGHBOURS, usable), dim=-1).indices)  # (M, R)
    copies = math.ceil(length / len(near_ids))
    shape = (count, copies, len(near_ids))
    uniform = torch.rand(shape, generator=rng).to(near_ids.device)
    ranks = (uniform.log() / math.log(_NEXT_NEIGHBOUR)).clamp(max=near_ids.shape[1] - 1).long()
    ranks[0] = 0
    positions = torch.arange(len(near_ids), device=near_ids.device).expand(shape)
    # They end where the target does.
    prompts = near_ids[positions, ranks].flatten(1)[:, -length:]
    return tokens.repaired(prompts, cosines[positions[0].flatten()[-length:]])


def _cosines(tokens: TargetTokens) -> Tensor:
    """Cosines of each of the target's tokens to all, (M, V); -inf for its own and barred ones."""
    matrix = tokens.vocabulary.matrix
    own_ids = torch.tensor(tokens.target.ids, device=matrix.device)
    own_embeds = F.normalize(tokens.lm.embed(own_ids).float(), dim=-1)  # (M, d)
    cosines = tokens.bar_(own_embeds @ F.normalize(matrix.float(), dim=-1).T)
    is_own = torch.isin(tokens.ids(tokens.allowed_columns), own_ids)
    if not is_own.all():  # else the target's own are all there is
        cosines[:, tokens.allowed_columns[is_own]] = -torch.inf
    return cosines
