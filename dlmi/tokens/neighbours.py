r"""Prompts that echo a target without holding it: each token is near one of the target's.

.. math::
    x_i \in near_r( y_{j(i)} ), \quad
    near_1(y), near_2(y), ... = \text{other tokens by } \cos( e_v, e_y ), \quad
    P(r) \propto 0.6^r

A causal LM tends to continue with what it has just read. Where a prompt may not hold the target's
own tokens, it can hold their nearest neighbours: other forms of a word, or similar words. One
neighbour repeated would be continued by itself; several different ones point to the token that they
are all near. So the prompt repeats the target's order as often as it fits, with other neighbours
each time. This is a starting point for a search, and a baseline for it.

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
    """Draw prompts of a target's neighbours, (C, N) token ids, never the target's own tokens.

    The first prompt holds nearest neighbours only. Where prompts must round-trip, tokens that
    merge are replaced by other neighbours.
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
    # The last token of a prompt is a neighbour of the target's last.
    prompts = near_ids[positions, ranks].flatten(1)[:, -length:]
    return tokens.repaired(prompts, cosines[positions[0].flatten()[-length:]])


def _cosines(tokens: TargetTokens) -> Tensor:
    """Cosines of each of the target's tokens to all, (M, V); -inf for its own and barred ones."""
    matrix = tokens.vocabulary.matrix
    own_ids = torch.tensor(tokens.target.ids, device=matrix.device)
    own_embeds = F.normalize(tokens.lm.embed(own_ids).float(), dim=-1)  # (M, d)
    cosines = tokens.bar_(own_embeds @ F.normalize(matrix.float(), dim=-1).T)
    is_own = torch.isin(tokens.ids(tokens.allowed_columns), own_ids)
    if not is_own.all():  # else no other tokens are allowed
        cosines[:, tokens.allowed_columns[is_own]] = -torch.inf
    return cosines
