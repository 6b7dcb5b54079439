"""Scores of many prompts that differ from one prompt in a few tokens.

Everything before the first token that differs is the same for all, so its keys and values are
computed once and shared: a candidate that changes position p costs N - p + M - 1 tokens.

Axes: C candidates, N prompt tokens, P of a prompt in its frame, M target tokens.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.fluency import Fluency, reading_states
from dlmi.frames import Example
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


def score_candidates(
    lm: FrozenLM,
    prompt_ids: Tensor,
    candidate_ids: Tensor,
    target: Target,
    loss: LossName = "cross_entropy",
    prompt_bos: bool = False,
    fluency: Fluency | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Teacher-forced scores of candidates whose prompt is read for them alone.

    Returns:
        What `ReadPrompt.score` gives, and how many tokens the LM has read.
    """
    prompt = ReadPrompt(lm, prompt_ids, target, prompt_bos, fluency)
    losses, output_ids = prompt.score(candidate_ids, loss)
    return losses, output_ids, prompt.tokens_read


@dataclass(frozen=True)
class _Reading:
    """A prompt in one of its frames, as it was read.

    Attributes:
        ids: All tokens before the target, (P,).
        places: Where the prompt's own stand.
        fixed: How many of the first ones no prompt of the run changes.
        target: What the LM is to say.
        prefix: Keys and values of the tokens.
        states: What the head saw of those that were read now, where that is wanted.
    """

    ids: Tensor
    places: list[int]
    fixed: int
    target: tuple[int, ...]
    prefix: Prefix
    states: Tensor | None


class ReadPrompt:
    """A prompt that the LM has read once, for candidates that are made from it.

    Args:
        lm: The model.
        prompt_ids: The prompt, (N,).
        target: The one target; where it has examples, losses are their mean.
        prompt_bos: Put BoS before each prompt.
        fluency: A penalty on unlikely prompts, added to each loss.

    Attributes:
        tokens_read: How many tokens the LM has read so far. BoS and what frames have in common cost
            nothing, as everywhere.
    """

    def __init__(
        self,
        lm: FrozenLM,
        prompt_ids: Tensor,
        target: Target,
        prompt_bos: bool = False,
        fluency: Fluency | None = None,
    ) -> None:
        self.tokens_read = 0
        self._lm = lm
        self._fluency = fluency
        self._bos_ids = (lm.bos_id,) if prompt_bos else ()
        self._readings = [self._read(prompt_ids, example) for example in target.readings]

    @torch.no_grad()
    def _read(self, prompt_ids: Tensor, example: Example) -> _Reading:
        frame = example.frame
        if frame.reasoning is not None:
            raise RuntimeError("The reasoning of this example has not been written yet.")
        known_ids = (*self._bos_ids, *frame.pieces[0][: frame.head])
        known = self._lm.prefix(known_ids) if known_ids else None
        ids = prompt_ids.new_tensor((*self._bos_ids, *frame.full_ids(prompt_ids.tolist())))
        places = [place + len(self._bos_ids) for place in frame.places(len(prompt_ids))]
        new_ids = ids[len(known_ids) :]
        with self._watch() as states:
            prefix = self._lm.read_prefix(new_ids, known)
        self.tokens_read += len(new_ids)
        own_states = states[0][:, -len(new_ids) :] if states else None
        return _Reading(ids, places, len(known_ids), example.ids, prefix, own_states)

    @torch.no_grad()
    def score(
        self,
        candidate_ids: Tensor,
        loss: LossName = "cross_entropy",
        token_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Teacher-forced scores of candidates.

        Args:
            candidate_ids: (C, N).
            loss: Which loss.
            token_weights: What each token of the target weighs in its loss, (M,); default: all
                the same.

        Returns:
            The loss of each candidate, (C,), and what teacher forcing decodes after it, (C, M). A
            candidate that decodes the target this way also produces it in a free greedy run.
        """
        scores = [self._score(r, candidate_ids, loss, token_weights) for r in self._readings]
        if len(scores) == 1:
            return scores[0]
        losses, output_ids = zip(*scores, strict=True)
        return torch.stack(losses).mean(0), torch.cat(output_ids, dim=1)

    def _score(
        self,
        reading: _Reading,
        candidate_ids: Tensor,
        loss: LossName,
        token_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        lm, length = self._lm, len(reading.ids)
        whole_ids = reading.ids.repeat(len(candidate_ids), 1)  # (C, P)
        whole_ids[:, reading.places] = candidate_ids
        target_ids, mask = pad_ids([reading.target], lm.device)  # (1, M)
        weights = mask if token_weights is None else token_weights[None]
        differs = whole_ids != reading.ids
        # A candidate like the prompt itself shares all but the last token, whose logits it needs.
        shared = torch.where(differs.any(-1), differs.int().argmax(-1), length - 1)  # (C,)
        if reading.prefix.layers is None:
            shared.fill_(reading.fixed)
        overhead = _PASS_OVERHEAD.get(lm.device.type, _DEFAULT_OVERHEAD)
        row_length = length + len(reading.target) - 1
        losses: list[Tensor] = []
        output_ids: list[Tensor] = []
        order: list[int] = []
        for start, members in group_by_shared(shared.tolist(), row_length, overhead):
            group_ids = whole_ids[members]
            common = reading.prefix.shortened(start)

            def work(
                rows: slice, ids: Tensor = group_ids, start: int = start, common: Prefix = common
            ) -> None:
                expanded = target_ids.expand(len(ids[rows]), -1)
                with self._watch() as states:
                    logits = lm.target_logits(lm.embed(ids[rows, start:]), expanded, common or None)
                row_losses = target_loss(loss, logits, expanded, weights.expand_as(expanded))
                if self._fluency is not None:
                    assert reading.states is not None
                    row_losses += self._fluency.of_candidates(
                        ids[rows, reading.fixed :],
                        reading.states[:, : start - reading.fixed],
                        states[0][:, -(row_length - start) :],
                    )
                losses.append(row_losses)
                output_ids.append(logits.argmax(-1))

            lm.rows_per_pass.run(lm, len(members), row_length - start, len(reading.target), work)
            order += members
            self.tokens_read += len(members) * (row_length - start)
        back = torch.tensor(order, device=lm.device).argsort()
        return torch.cat(losses)[back], torch.cat(output_ids)[back]

    def _watch(self) -> AbstractContextManager[list[Tensor]]:
        return nullcontext([]) if self._fluency is None else reading_states(self._lm)
