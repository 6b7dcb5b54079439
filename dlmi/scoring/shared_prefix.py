"""Prompts that differ from one prompt in a few tokens.

Everything before the first token that differs is the same for all, so its keys and values are
computed once and shared: a variation that changes position p costs N - p + M - 1 tokens.

Axes: C variations, N prompt tokens, P of a prompt in its context, M target tokens.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.scoring.batch import pad_ids
from dlmi.scoring.fluency import Fluency, reading_states
from dlmi.scoring.losses import LossName, target_loss
from dlmi.scoring.prefixes import PrefixStore
from dlmi.targets.context import Example

# What a group of variations costs beside its tokens, in tokens: reading the weights, or launching
# kernels. One number for all devices, so that a budget ends at the same step on each of them.
_GROUP_OVERHEAD = 40


def group_by_shared(
    shared: Sequence[int], length: int, overhead: int = _GROUP_OVERHEAD
) -> list[tuple[int, list[int]]]:
    """Group variations so that the fewest tokens are read.

    Args:
        shared: How many first tokens each variation shares with the prompt.
        length: Tokens of a whole row.
        overhead: What a group costs by itself, in tokens.

    Returns:
        Of each group, how many tokens its members share and who they are.

    >>> group_by_shared([0, 9, 8, 0], length=10, overhead=3)
    [(0, [0, 3]), (8, [2, 1])]
    """
    order = sorted(range(len(shared)), key=lambda i: shared[i])
    starts = [i for i in range(len(order)) if i == 0 or shared[order[i]] != shared[order[i - 1]]]
    ends = [*starts[1:], len(order)]
    # cheapest[j]: cost of the variations before starts[j], and where their last group begins.
    cheapest: list[tuple[int, int]] = [(0, 0)]
    for j in range(len(starts)):
        costs = [
            cheapest[i][0] + overhead + (ends[j] - start) * (length - shared[order[start]])
            for i, start in enumerate(starts[: j + 1])
        ]
        best = min(range(j + 1), key=costs.__getitem__)
        cheapest.append((costs[best], best))
    groups = []
    j = len(starts)
    while j > 0:
        i = cheapest[j][1]
        members = order[starts[i] : ends[j - 1]]
        groups.append((shared[members[0]], members))
        j = i
    return groups[::-1]


@dataclass(frozen=True, eq=False)
class Variations:
    """Variations of a prompt in one context, and how they are to be read.

    Attributes:
        like_ids: All tokens of the prompt that they vary, P of them.
        ids: All tokens of each variation, (C, P).
        groups: How many first tokens the members of a group share, and who they are.
        target_ids: What the LM is to say.
        fixed: How many of the first tokens stand before the prompt in every context.
    """

    like_ids: tuple[int, ...]
    ids: Tensor
    groups: list[tuple[int, list[int]]]
    target_ids: tuple[int, ...]
    fixed: int

    @classmethod
    def of(cls, prompt_ids: Tensor, like_ids: Tensor, example: Example) -> "Variations":
        """Plan how prompts, (C, N), are read with an example."""
        context = example.context
        if context.reasoning is not None:
            raise RuntimeError("The reasoning of this example has not been written yet.")
        like = context.ids(like_ids.tolist())
        first = len(context.start_ids)
        positions = [first + position for position in context.positions(len(like_ids))]
        whole = torch.tensor(like).repeat(len(prompt_ids), 1)  # (C, P)
        whole[:, positions] = prompt_ids.cpu()
        differs = whole != torch.tensor(like)
        # A variation like the prompt itself shares all but the last token, whose logits it needs.
        shared = torch.where(differs.any(-1), differs.int().argmax(-1), len(like) - 1)  # (C,)
        groups = group_by_shared(shared.tolist(), len(like) + len(example.ids) - 1)
        return cls(like, whole, groups, example.ids, len(context.prefix_ids))

    @property
    def row_length(self) -> int:
        """Tokens of a whole row, with all of the target but its last."""
        return len(self.like_ids) + len(self.target_ids) - 1

    @property
    def tokens_read(self) -> int:
        """Tokens that are read after the prompt is known."""
        return sum(len(members) * (self.row_length - start) for start, members in self.groups)

    @property
    def tokens_read_whole(self) -> int:
        """Tokens that are read where nothing can be shared."""
        return len(self.ids) * self.row_length


@torch.no_grad()
def score_variations(
    lm: FrozenLM,
    store: PrefixStore,
    variations: Variations,
    loss: LossName,
    token_weights: Tensor | None,
    fluency: Fluency | None,
) -> tuple[Tensor, Tensor]:
    """Teacher-forced losses, (C,), and what teacher forcing decodes, (C, M).

    A variation that decodes the target this way also produces it in a free greedy run.

    Args:
        lm: The model.
        store: Keeps what the variations share.
        variations: What is read.
        loss: Which loss.
        token_weights: Weight of each target token, (M,); default: all the same.
        fluency: A penalty on unlikely prompts that is added to each loss.
    """
    target_ids, mask = pad_ids([variations.target_ids], lm.device)  # (1, M)
    weights = mask if token_weights is None else token_weights.to(lm.device)[None]
    row_length, keep, fixed = variations.row_length, target_ids.shape[1], variations.fixed
    groups = variations.groups if store.can_share else [(0, list(range(len(variations.ids))))]
    known = store.read(variations.like_ids) if store.can_share else None
    losses: list[Tensor] = []
    output_ids: list[Tensor] = []
    order: list[int] = []
    all_ids = variations.ids.to(lm.device)
    for start, members in groups:
        group_ids = all_ids[members]
        common = None if known is None or start == 0 else known.shortened(start)

        def work(rows: slice, ids: Tensor = group_ids, start: int = start) -> None:
            expanded = target_ids.expand(len(ids[rows]), -1)
            prefix = None if common is None else common.prefix  # noqa: B023
            watch: AbstractContextManager[list[Tensor]] = (
                nullcontext([]) if fluency is None else reading_states(lm)
            )
            with watch as states:
                logits = lm.target_logits(lm.embed(ids[rows, start:]), expanded, prefix)
            row_losses = target_loss(loss, logits, expanded, weights.expand_as(expanded))
            if fluency is not None:
                own = states[0][:, -(row_length - start) :]
                shared = own[:1, :0] if common is None else common.states  # noqa: B023
                assert shared is not None
                # The penalty is on the prompt alone: a BoS before it does not count.
                both = (shared[:, fixed:], own[:, max(fixed - start, 0) :])
                row_losses += fluency.of_variations(ids[rows, fixed:], *both)
            losses.append(row_losses)
            output_ids.append(logits.argmax(-1))

        lm.rows_per_pass.run(lm, len(members), row_length - start, keep, work)
        order += members
    back = torch.tensor(order, device=lm.device).argsort()
    return torch.cat(losses)[back], torch.cat(output_ids)[back]
