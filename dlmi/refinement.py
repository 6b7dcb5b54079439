r"""Discrete refinement: the rest of a budget is spent on single swaps of the prompt found so far.

.. math::
    g_{i,v} = - \langle e_v - e_{x_i}, \nabla_{e_{x_i}} d(f(x), y) \rangle, \quad
    C \subset \{ (i, v) : v \in top_K( g_i ) \}, \quad
    x \leftarrow \arg\min_{x' \in C \cup \{x\}} d(f(x'), y)

Here d is the cross-entropy of the target less the number of tokens that x gets right before its
first mistake, and in it the tokens up to the one after that mistake weigh more than the others: in
a free run, what comes after a mistake is said in another context. For the same reason tokens beyond
a horizon behind that mistake are not read at all, until it has moved on.

A relaxed prompt that works seldom stays whole when it is made discrete: the loss of its argmax is
far above its own. So any method may hand over its best discrete prompt x at a share of the budget.
From there each step tries a few swaps of a position i to a token v, drawn from the K that the
gradient at x promises most of at each position, :math:`g`; swaps near the end are drawn more often,
as fewer tokens have to be read again after them, and at first only the last positions are searched
at all, a window behind a beginning that the LM has read once. Those that lower the loss are put
together, the best two, the best three and so on, and the best of all is taken. As long as none is
better, x and so its gradient stay the same: it is not computed again, and no swap is tried twice.
After some steps without success the window is widened, to the whole prompt in the end. Then the
search steps aside: it moves to the best prompt that it has seen beside x, though that is worse, and
does not take back what it has swapped until it has found a new best prompt, which is kept in any
case.

Axes: B slots, N prompt tokens, W of them in the window, M target tokens, H of them before the
horizon, V tokens a prompt may hold, K swaps per position, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmi.candidates import ReadPrompt
from dlmi.errors import InputError, check_at_least_one
from dlmi.fluency import Fluency
from dlmi.passes import StepLosses, target_pass
from dlmi.round_trip import mend_prompts, surviving
from dlmi.slots import Slot
from dlmi.swaps import TRIED, count_right, draw_swaps, merge_swaps, token_weights
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

DEFAULT_WINDOW = 24
DEFAULT_HORIZON = 4
_SWAPS_PER_POSITION = 64
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
        fluency: The penalty on unlikely prompts, where there is one. It is on whole prompts, so
            that there is no window then.
        window: Positions at the end of a prompt that are searched first, W.
        horizon: Tokens of the target that are read from the first mistake on.
    """

    vocabulary: Vocabulary
    width: int
    prompt_bos: bool = False
    fluency: Fluency | None = None
    window: int = DEFAULT_WINDOW
    horizon: int = DEFAULT_HORIZON

    def step(self, slots: Sequence[Slot]) -> StepLosses:
        """One search step of each slot; the losses are of the prompts after it, without a graph."""
        for slot in slots:
            if _key("columns") not in slot.memory:
                self._begin(slot)
            if _key("swaps") not in slot.memory:
                self._propose(slot)
            self._search(slot)
        width = max(len(slot.target.ids) for slot in slots)
        output_ids = torch.full((len(slots), width), -1, device=self.vocabulary.lm.device)
        for row, slot in enumerate(slots):
            said_ids = slot.memory[_key("output_ids")]  # up to the horizon
            output_ids[row, : len(said_ids)] = said_ids
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
        whole = len(columns)
        slot.memory[_key("window")] = whole if self.fluency else min(self.window, whole)
        slot.memory[_key("right")] = 0
        slot.memory[_key("columns")] = columns
        self._charge_beginning(slot, columns)
        scores, output_ids = self._score(slot, self._read(slot, columns), columns[None])
        self._move(slot, columns, float(scores[0]), output_ids[0])

    def _propose(self, slot: Slot) -> None:
        """The swaps that the gradient at the slot's prompt promises most of."""
        matrix = self.vocabulary.matrix if self.fluency is None else self.fluency.matrix
        first = self._first(slot)
        columns = slot.memory[_key("columns")]
        mine = columns[first:, None]  # (W, 1)
        embeds = matrix[columns[first:]][None, None].clone().requires_grad_()  # (1, 1, W, d)
        with torch.enable_grad():
            losses, _ = target_pass(
                self.vocabulary.lm,
                [slot],
                embeds,
                "cross_entropy",
                prompt_bos=self.prompt_bos,
                fluency=self.fluency,
                token_weights=self._weights(slot)[None],
                targets=[self._target(slot, columns)],
            )
            [gradient] = torch.autograd.grad(losses.sum(), embeds)
        promises = -(gradient[0, 0] @ matrix.to(gradient.dtype).T)  # (W, V)
        promises -= promises.gather(1, mine)
        self.vocabulary.bar_(promises, slot.target)
        promises.scatter_(1, mine, -torch.inf)  # no swap at all
        if (left := slot.memory.get(_key("left"))) is not None:
            left = left[left[:, 0] >= first]
            promises[left[:, 0] - first, left[:, 1]] = -torch.inf
        count = min(_SWAPS_PER_POSITION, promises.shape[1])
        gains, swaps = promises.topk(count, dim=-1)  # (W, K)
        swaps[gains.isneginf()] = TRIED
        slot.memory[_key("swaps")] = swaps

    @torch.no_grad()
    def _search(self, slot: Slot) -> None:
        columns = slot.memory[_key("columns")]
        is_used_up = bool((slot.memory[_key("swaps")] == TRIED).all())
        if is_used_up or slot.memory.get(_key("waited"), 0) >= _PATIENCE:
            return self._widen_or_step_aside(slot, columns)
        candidates = self._surviving(slot, self._candidates(slot, columns))
        if len(candidates) == 0:
            return None
        prompt = self._read(slot, columns)
        scores, output_ids = self._score(slot, prompt, candidates)
        helps = scores < slot.memory[_key("score")]
        by_gain = candidates[helps][scores[helps].argsort()]
        merged = self._surviving(slot, merge_swaps(columns, by_gain, _MERGED_SWAPS))
        if len(merged):
            merged_scores, merged_output_ids = self._score(slot, prompt, merged)
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

    def _widen_or_step_aside(self, slot: Slot, columns: Tensor) -> None:
        """Nothing helps: search more positions, or move on though it is to a worse prompt."""
        memory = slot.memory
        if self._first(slot) > 0:
            memory[_key("window")] = min(2 * memory[_key("window")], len(columns))
            self._charge_beginning(slot, columns)
            for name in ("swaps", "waited"):
                memory.pop(_key(name), None)
        elif _key("aside_columns") in memory:
            score, output_ids = memory[_key("aside_score")], memory[_key("aside_output_ids")]
            self._move(slot, memory[_key("aside_columns")], score, output_ids)
        else:
            self._kick(slot, columns)

    def _candidates(self, slot: Slot, columns: Tensor) -> Tensor:
        """Swaps that were not tried yet, (C, N); the more has to be read after one, the rarer."""
        positions = torch.arange(self._first(slot), len(columns), device=columns.device)
        costs = len(columns) - positions + self._horizon(slot) - 1  # (W,)
        swaps = slot.memory[_key("swaps")]
        rows, tokens = draw_swaps(swaps, costs**2, self.width, slot.generator)
        candidates = columns.repeat(len(rows), 1)
        candidates[torch.arange(len(rows)), positions[rows]] = tokens
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
        scores, output_ids = self._score(slot, self._read(slot, columns), kicked[None])
        self._move(slot, kicked, float(scores[0]), output_ids[0])

    def _first(self, slot: Slot) -> int:
        """The first position of the window."""
        window: int = slot.memory[_key("window")]
        return len(slot.memory[_key("columns")]) - window

    def _horizon(self, slot: Slot) -> int:
        """How many tokens of the target are read."""
        right: int = slot.memory[_key("right")]
        return min(right + self.horizon, len(slot.target.ids))

    def _weights(self, slot: Slot) -> Tensor:
        weights = token_weights(slot.memory[_key("right")], self._horizon(slot))
        return weights.to(self.vocabulary.lm.device)

    def _target(self, slot: Slot, columns: Tensor) -> Target:
        """What the window is read with: the prompt before it, and the target up to the horizon."""
        target, first = slot.target, self._first(slot)
        frame = target.frame
        if first > 0:
            frame = frame.behind(self.vocabulary.ids(columns).tolist(), first)
        return replace(target, ids=target.ids[: self._horizon(slot)], frame=frame)

    def _charge_beginning(self, slot: Slot, columns: Tensor) -> None:
        """What stands before the window is read once."""
        slot.forward_tokens += self._target(slot, columns).frame.head - slot.target.frame.head

    def _read(self, slot: Slot, columns: Tensor) -> ReadPrompt:
        prompt = ReadPrompt(
            self.vocabulary.lm,
            self.vocabulary.ids(columns[self._first(slot) :]),
            self._target(slot, columns),
            prompt_bos=self.prompt_bos,
            fluency=self.fluency,
        )
        slot.forward_tokens += prompt.tokens_read
        return prompt

    def _score(self, slot: Slot, prompt: ReadPrompt, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted losses less right tokens, (C,), and what teacher forcing decodes, (C, H)."""
        read_before = prompt.tokens_read
        ids = self.vocabulary.ids(candidates[:, self._first(slot) :])
        losses, output_ids = prompt.score(ids, token_weights=self._weights(slot))
        slot.forward_tokens += prompt.tokens_read - read_before
        return losses - self._count_right(slot, output_ids), output_ids

    def _count_right(self, slot: Slot, output_ids: Tensor) -> Tensor:
        target_ids = torch.tensor(slot.target.ids, device=output_ids.device)
        return count_right(output_ids, target_ids[: output_ids.shape[-1]])

    def _move(self, slot: Slot, columns: Tensor, score: float, output_ids: Tensor) -> None:
        memory, before = slot.memory, slot.memory[_key("columns")]
        right = int(self._count_right(slot, output_ids))
        is_known = right == memory[_key("right")]
        while not is_known:
            memory[_key("right")] = right  # other weights and another horizon, so another score
            scores, [output_ids] = self._score(slot, self._read(slot, columns), columns[None])
            score = float(scores[0])
            # More may be right beyond the old horizon; fewer is a tie that rounding has broken.
            found = int(self._count_right(slot, output_ids))
            right, is_known = max(right, found), found <= right
        slot.is_promising = right == len(slot.target.ids)
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
