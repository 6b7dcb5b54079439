r"""Discrete refinement: the rest of a budget is spent on single swaps of the prompt found so far.

.. math::
    g_{i,v} = - \langle e_v - e_{x_i}, \nabla_{e_{x_i}} d(f(x), y) \rangle, \quad
    C \subset \{ (i, v) : v \in top_K( g_i ) \}, \quad
    x \leftarrow \arg\min_{x' \in C \cup \{x\}} d(f(x'), y)

Here d is the cross-entropy of the target less the number of tokens that x gets right before its
first mistake, and in it the tokens up to the one after that mistake weigh more than the others: in
a free run, what comes after a mistake is said in another context.

A relaxed prompt that works seldom stays whole when it is made discrete: the loss of its argmax is
far above its own. So any method may hand over its best discrete prompt x at a share of the budget.
From there each step tries a few swaps of a position i to a token v, drawn from the K that the
gradient at x promises most of at each position, :math:`g`; swaps near the end are drawn more often,
as fewer tokens have to be read again after them. Those that lower the loss are put together, the
best two, the best three and so on, and the best of all is taken. As long as none is better, x and
so its gradient stay the same: it is not computed again, and no swap is tried twice. After some
steps without success the search steps aside: it moves to the best prompt that it has seen beside x,
though that is worse, and does not take back what it has swapped until it has found a new best
prompt, which is kept in any case.

Axes: B slots, N prompt tokens, M target tokens, V tokens a prompt may hold, K swaps per position,
C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlmi.candidates import score_candidates
from dlmi.errors import InputError, check_at_least_one
from dlmi.fluency import Fluency
from dlmi.passes import StepLosses, target_pass
from dlmi.round_trip import mend_prompts, surviving
from dlmi.slots import Slot
from dlmi.swaps import count_right, merge_swaps, token_weights
from dlmi.vocabulary import Vocabulary

_SWAPS_PER_POSITION = 64
_TRIED = -1
_MERGED_SWAPS = 6  # of those that help, at most so many are put together
_PATIENCE = 6  # steps without a better prompt before the search steps aside
_KICKED_SHARE = 0.2  # of the positions, where no swap is possible at all


def check_refinement(refine_after: float, refine_width: int) -> None:
    """Raise `InputError` for a share that is none, or a search of no candidates."""
    if not 0 <= refine_after <= 1:
        raise InputError(
            "Expected `model.refine_after` to be a share of the budget, 0 to 1 (1: never), but "
            f"got {refine_after}."
        )
    check_at_least_one("model", refine_width=refine_width)


def dearest_step(width: int, prompt_length: int, target_length: int) -> int:
    """Token passes of a step, at most: a first one scores its start and takes a gradient."""
    read = prompt_length + target_length - 1
    return 2 * read + 5 * prompt_length + (3 + width + _MERGED_SWAPS) * read


@dataclass(frozen=True)
class Refinement:
    """The search that follows a relaxation.

    Attributes:
        vocabulary: The LM, and what its prompts may hold.
        width: Candidates per step, C.
        prompt_bos: Put BoS before each prompt.
        fluency: The penalty on unlikely prompts, where there is one.
    """

    vocabulary: Vocabulary
    width: int
    prompt_bos: bool = False
    fluency: Fluency | None = None

    def step(self, slots: Sequence[Slot]) -> StepLosses:
        """One search step of each slot; the losses are of the prompts after it, without a graph."""
        for slot in slots:
            if _key("columns") not in slot.memory:
                self._begin(slot)
        self._propose([slot for slot in slots if _key("swaps") not in slot.memory])
        for slot in slots:
            self._search(slot)
        width = max(len(slot.target.ids) for slot in slots)
        output_ids = torch.full((len(slots), width), -1, device=self.vocabulary.lm.device)
        for row, slot in enumerate(slots):
            output_ids[row, : len(slot.target.ids)] = slot.memory[_key("output_ids")]
        memories = [slot.memory for slot in slots]
        losses = [memory[_key("score")] + memory[_key("right")] for memory in memories]
        return StepLosses(torch.tensor(losses, device=output_ids.device), output_ids)

    def prompt_ids(self, slot: Slot) -> Tensor | None:
        """The best prompt of the search, (N,); None before it has begun."""
        columns = slot.memory.get(_key("best_columns"))
        return None if columns is None else self.vocabulary.ids(columns)

    def columns(self, slot: Slot) -> Tensor:
        """Where the search stands, (N,); it has begun."""
        columns: Tensor = slot.memory[_key("columns")]
        return columns

    @torch.no_grad()
    def _begin(self, slot: Slot) -> None:
        """From the most likely of the prompts that were decoded: the best one or the latest."""
        assert slot.best is not None
        assert slot.last is not None
        start = min(slot.best, slot.last, key=lambda evaluation: evaluation.discrete_loss)
        ids = torch.tensor(start.prompt_ids, device=self.vocabulary.lm.device)
        columns = self.vocabulary.columns(ids)
        slot.memory[_key("right")] = 0
        scores, output_ids = self._score(slot, columns, columns[None])
        self._move(slot, columns, float(scores[0]), output_ids[0])

    def _propose(self, slots: Sequence[Slot]) -> None:
        """The swaps that the gradient at each slot's prompt promises most of."""
        if not slots:
            return
        matrix = self.vocabulary.matrix if self.fluency is None else self.fluency.matrix
        columns = torch.stack([slot.memory[_key("columns")] for slot in slots])  # (B, N)
        embeds = matrix[columns][:, None].clone().requires_grad_()  # (B, 1, N, d)
        with torch.enable_grad():
            losses, _ = target_pass(
                self.vocabulary.lm,
                slots,
                embeds,
                "cross_entropy",
                prompt_bos=self.prompt_bos,
                fluency=self.fluency,
                token_weights=nn.utils.rnn.pad_sequence(
                    [self._weights(slot) for slot in slots], batch_first=True
                ),
            )
            [gradients] = torch.autograd.grad(losses.sum(), embeds)
        for slot, mine, gradient in zip(slots, columns, gradients[:, 0], strict=True):
            promises = -(gradient @ matrix.to(gradient.dtype).T)  # (N, V)
            promises -= promises.gather(1, mine[:, None])
            self.vocabulary.bar_(promises, slot.target)
            promises.scatter_(1, mine[:, None], -torch.inf)  # no swap at all
            if (left := slot.memory.get(_key("left"))) is not None:
                promises[left[:, 0], left[:, 1]] = -torch.inf
            count = min(_SWAPS_PER_POSITION, promises.shape[1])
            gains, swaps = promises.topk(count, dim=-1)  # (N, K)
            swaps[gains.isneginf()] = _TRIED
            slot.memory[_key("swaps")] = swaps

    @torch.no_grad()
    def _search(self, slot: Slot) -> None:
        columns = slot.memory[_key("columns")]
        is_used_up = bool((slot.memory[_key("swaps")] == _TRIED).all())
        if is_used_up or slot.memory.get(_key("waited"), 0) >= _PATIENCE:
            return self._step_aside(slot, columns)
        candidates = self._surviving(slot, self._candidates(slot, columns))
        if len(candidates) == 0:
            return None
        scores, output_ids = self._score(slot, columns, candidates)
        helps = scores < slot.memory[_key("score")]
        by_gain = candidates[helps][scores[helps].argsort()]
        merged = self._surviving(slot, merge_swaps(columns, by_gain, _MERGED_SWAPS))
        if len(merged):
            merged_scores, merged_output_ids = self._score(slot, columns, merged)
            candidates = torch.cat([candidates, merged])
            scores = torch.cat([scores, merged_scores])
            output_ids = torch.cat([output_ids, merged_output_ids])
        best = int(scores.argmin())
        score = float(scores[best])
        if score < slot.memory[_key("score")]:
            self._move(slot, candidates[best], score, output_ids[best])
        else:
            self._wait(slot, candidates[best], score, output_ids[best])
        return None

    def _wait(self, slot: Slot, columns: Tensor, score: float, output_ids: Tensor) -> None:
        """Remember the best prompt beside the present one."""
        memory = slot.memory
        memory[_key("waited")] = memory.get(_key("waited"), 0) + 1
        if score < memory.get(_key("aside_score"), torch.inf):
            memory[_key("aside_columns")], memory[_key("aside_score")] = columns, score
            memory[_key("aside_output_ids")] = output_ids

    def _step_aside(self, slot: Slot, columns: Tensor) -> None:
        """Move to the best prompt beside the present one, though it is worse."""
        memory = slot.memory
        if _key("aside_columns") not in memory:
            return self._kick(slot, columns)
        aside = memory[_key("aside_columns")]
        score, output_ids = memory[_key("aside_score")], memory[_key("aside_output_ids")]
        return self._move(slot, aside, score, output_ids)

    def _candidates(self, slot: Slot, columns: Tensor) -> Tensor:
        """Random swaps that were not tried yet, those that cost less more often, (C, N)."""
        swaps = slot.memory[_key("swaps")].view(-1)
        untried = (swaps != _TRIED).nonzero()[:, 0]
        positions = untried // (len(swaps) // len(columns))
        costs = len(columns) - positions + len(slot.target.ids) - 1  # tokens read after a swap
        # The smallest of exponential draws: without replacement, weighted by 1 / cost.
        draws = torch.empty(len(untried), device=slot.generator.device)
        draws = draws.exponential_(generator=slot.generator).to(costs.device) * costs
        chosen = draws.argsort()[: self.width]
        candidates = columns.repeat(len(chosen), 1)
        candidates[torch.arange(len(chosen)), positions[chosen]] = swaps[untried[chosen]]
        swaps[untried[chosen]] = _TRIED
        return candidates

    def _surviving(self, slot: Slot, candidates: Tensor) -> Tensor:
        """Those that survive decoding and encoding, where they must."""
        if not self.vocabulary.must_round_trip or len(candidates) == 0:
            return candidates
        return candidates[surviving(self.vocabulary, candidates, slot.target)]

    def _kick(self, slot: Slot, columns: Tensor) -> None:
        """No swap is possible: change a few tokens at random and go on from there."""
        allowed = self.vocabulary.allowed_columns(slot.target)
        count = max(1, round(_KICKED_SHARE * len(columns)))
        device = slot.generator.device
        order = torch.rand(len(columns), generator=slot.generator, device=device).argsort()
        picks = torch.randint(len(allowed), (count,), generator=slot.generator, device=device)
        kicked = columns.clone()
        kicked[order[:count]] = allowed[picks]
        if self.vocabulary.must_round_trip:
            kicked_ids = self.vocabulary.ids(kicked)[None]
            [mended_ids] = mend_prompts(self.vocabulary, slot, kicked_ids, lambda: None)
            kicked = self.vocabulary.columns(mended_ids)
        scores, output_ids = self._score(slot, columns, kicked[None])
        self._move(slot, kicked, float(scores[0]), output_ids[0])

    def _weights(self, slot: Slot) -> Tensor:
        weights = token_weights(slot.memory[_key("right")], len(slot.target.ids))
        return weights.to(self.vocabulary.lm.device)

    def _score(self, slot: Slot, columns: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted losses less right tokens, (C,), and what teacher forcing decodes, (C, M)."""
        losses, output_ids, tokens_read = score_candidates(
            self.vocabulary.lm,
            self.vocabulary.ids(columns),
            self.vocabulary.ids(candidates),
            slot.target,
            prompt_bos=self.prompt_bos,
            fluency=self.fluency,
            token_weights=self._weights(slot),
        )
        slot.forward_tokens += tokens_read
        return losses - count_right(output_ids, self._target_ids(slot)), output_ids

    def _target_ids(self, slot: Slot) -> Tensor:
        return torch.tensor(slot.target.ids, device=self.vocabulary.lm.device)

    def _move(self, slot: Slot, columns: Tensor, score: float, output_ids: Tensor) -> None:
        memory = slot.memory
        right = int(count_right(output_ids, self._target_ids(slot)))
        slot.is_promising = right == len(slot.target.ids)
        if right != memory[_key("right")]:  # other weights, another score
            memory[_key("right")] = right
            score = float(self._score(slot, columns, columns[None])[0])
        before = memory.get(_key("columns"), columns)
        for name in ("swaps", "waited", "aside_columns", "aside_score", "aside_output_ids"):
            memory.pop(_key(name), None)  # those of the prompt before
        memory[_key("columns")], memory[_key("score")] = columns, score
        memory[_key("output_ids")] = output_ids
        if score <= memory.get(_key("best_score"), score):
            memory[_key("best_columns")], memory[_key("best_score")] = columns, score
            memory.pop(_key("left"), None)
        else:  # bar the way back
            positions = (columns != before).nonzero()[:, 0]
            left = torch.stack([positions, before[positions]], dim=-1)
            memory[_key("left")] = torch.cat([memory.get(_key("left"), left[:0]), left])


def _key(name: str) -> str:
    """Where the search keeps its own in a slot's memory."""
    return f"refined_{name}"
