r"""Prompts that echo a target without saying it: each token is near one of the target's.

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

from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

_NEIGHBOURS = 8
_NEXT_NEIGHBOUR = 0.6  # how much rarer each neighbour is than the one before it


def echo_prompts(
    vocabulary: Vocabulary, target: Target, length: int, count: int, generator: torch.Generator
) -> Tensor:
    """Draw prompts of a target's neighbours.

    Args:
        vocabulary: What they may hold; the target's own tokens are left out in any case.
        target: What is to be said.
        length: Tokens of a prompt, N.
        count: How many prompts, C.
        generator: Source of the draws.

    Returns:
        Columns, (C, N). The first holds nearest neighbours only.
    """
    near = nearest_columns(vocabulary, target, _NEIGHBOURS)  # (M, R)
    copies = math.ceil(length / len(near))
    shape = (count, copies, len(near))
    uniform = torch.rand(shape, generator=generator, device=generator.device).to(near.device)
    ranks = (uniform.log() / math.log(_NEXT_NEIGHBOUR)).clamp(max=near.shape[1] - 1).long()
    ranks[0] = 0
    places = torch.arange(len(near), device=near.device).expand(shape)
    return near[places, ranks].flatten(1)[:, -length:]  # ends where the target does


def nearest_columns(vocabulary: Vocabulary, target: Target, count: int) -> Tensor:
    """Allowed tokens other than the target's own, by cosine to each of its tokens, (M, R)."""
    allowed = vocabulary.allowed_columns(target)
    own_ids = torch.tensor(target.ids, device=allowed.device)
    others = allowed[~torch.isin(vocabulary.ids(allowed), own_ids)]
    if len(others) == 0:  # nothing else may be said
        others = allowed
    own_embeds = F.normalize(vocabulary.lm.embed(own_ids).float(), dim=-1)  # (M, d)
    other_embeds = F.normalize(vocabulary.matrix[others].float(), dim=-1)
    cosines = own_embeds @ other_embeds.T  # (M, V)
    return others[cosines.topk(min(count, len(others)), dim=-1).indices]
