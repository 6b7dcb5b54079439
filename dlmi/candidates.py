"""Scores of many prompts that differ from one prompt in a few tokens.

Everything before the first token that differs is the same for all, so its keys and values are
computed once and shared: a candidate that changes position p costs N - p + M - 1 tokens.

Axes: C candidates, N prompt tokens, P of a prompt in its frame, M target tokens.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dlmi.fluency import Fluency, reading_states
from dlmi.layouts import pad_ids
from dlmi.lm import FrozenLM
from dlmi.losses import LossName, target_loss
from dlmi.prefix import Prefix
from dlmi.targets import Target

# What a pass costs beside its tokens, in tokens: reading the weights, or launching the kernels.
_PASS_OVERHEAD = {"cpu": 40}
_DEFAULT_OVERHEAD = 1024


def group_by_shared(
    shared: Sequence[int], length: int, overhead: int
) -> list[tuple[int, list[int]]]:
    """Group candidates so that the fewest tokens are read.

    Args:
        shared: How many first tokens each candidate shares with the prompt.
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
    # cheapest[j]: cost of the candidates before starts[j], and where their last group begins.
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


@torch.no_grad()
def score_candidates(
    lm: FrozenLM,
    prompt_ids: Tensor,
    candidate_ids: Tensor,
    target: Target,
    loss: LossName = "cross_entropy",
    prompt_bos: bool = False,
    fluency: Fluency | None = None,
    token_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Teacher-forced scores of candidates.

    Args:
        lm: The model.
        prompt_ids: What they were made from, (N,).
        candidate_ids: (C, N).
        target: The one target; where it has examples, the loss is their mean.
        loss: Which loss.
        prompt_bos: Put BoS before each prompt.
        fluency: A penalty on unlikely prompts, added to each loss.
        token_weights: What each token of the target weighs in its loss, (M,); default: the same.

    Returns:
        The loss of each candidate, (C,), what teacher forcing decodes after it, (C, M), and how
        many tokens the LM has read. A candidate that decodes the target this way also produces it
        in a free greedy run.
    """
    bos_ids = prompt_ids.new_tensor([lm.bos_id] if prompt_bos else [])
    scores = []
    for example in target.readings:
        if example.frame.reasoning is not None:
            raise RuntimeError("The reasoning of this example has not been written yet.")
        around = prompt_ids.new_tensor(example.frame.full_ids([0] * len(prompt_ids)))
        places = example.frame.places(len(prompt_ids))
        in_frame, candidates = around.clone(), around.repeat(len(candidate_ids), 1)
        in_frame[places], candidates[:, places] = prompt_ids, candidate_ids
        scores.append(
            _score(lm, in_frame, candidates, example.ids, loss, bos_ids, fluency, token_weights)
        )
    if len(scores) == 1:
        return scores[0]
    losses, output_ids, tokens_read = zip(*scores, strict=True)
    return torch.stack(losses).mean(0), torch.cat(output_ids, dim=1), sum(tokens_read)


def _score(
    lm: FrozenLM,
    prompt_ids: Tensor,
    candidate_ids: Tensor,
    target: tuple[int, ...],
    loss: LossName,
    bos_ids: Tensor,
    fluency: Fluency | None,
    token_weights: Tensor | None,
) -> tuple[Tensor, Tensor, int]:
    """The same of whole prompts, (P,) and (C, P), and one target."""
    length = len(prompt_ids)
    target_ids, mask = pad_ids([target], lm.device)  # (1, M)
    weights = mask if token_weights is None else token_weights[None]

    def watch() -> AbstractContextManager[list[Tensor]]:
        return nullcontext([]) if fluency is None else reading_states(lm)

    with watch() as prompt_states:
        prefix = lm.read_prefix(torch.cat([bos_ids, prompt_ids]))
    differs = candidate_ids != prompt_ids
    # A candidate like the prompt itself shares all but the last token, whose logits it needs.
    shared = torch.where(differs.any(-1), differs.int().argmax(-1), length - 1)  # (C,)
    if prefix.layers is None:
        shared.zero_()
    overhead = _PASS_OVERHEAD.get(lm.device.type, _DEFAULT_OVERHEAD)
    row_length = length + len(target) - 1
    tokens_read = len(prefix)
    losses: list[Tensor] = []
    output_ids: list[Tensor] = []
    order: list[int] = []
    for start, members in group_by_shared(shared.tolist(), row_length, overhead):
        group_ids = candidate_ids[members]
        common = prefix.shortened(len(bos_ids) + start)

        def work(
            rows: slice, ids: Tensor = group_ids, start: int = start, common: Prefix = common
        ) -> None:
            expanded = target_ids.expand(len(ids[rows]), -1)
            with watch() as states:
                logits = lm.target_logits(lm.embed(ids[rows, start:]), expanded, common or None)
            row_losses = target_loss(loss, logits, expanded, weights.expand_as(expanded))
            if fluency is not None:
                shared_states = prompt_states[0][:, len(bos_ids) :][:, :start]
                own_states = states[0][:, -(row_length - start) :]
                row_losses += fluency.of_candidates(ids[rows], shared_states, own_states)
            losses.append(row_losses)
            output_ids.append(logits.argmax(-1))

        lm.rows_per_pass.run(lm, len(members), row_length - start, len(target), work)
        order += members
        tokens_read += len(members) * (row_length - start)
    back = torch.tensor(order, device=lm.device).argsort()
    return torch.cat(losses)[back], torch.cat(output_ids)[back], tokens_read
