r"""SwapSearch: our recipe. From a start that echoes the target, swap what the gradient promises.

.. math::
    g_{i,v} = - \langle e_v - e_{x_i}, \nabla_{e_{x_i}} d(f(x), y) \rangle, \quad
    C \subset \{ (i, v) : v \in top_K( g_i ) \}, \quad
    x \leftarrow \arg\min_{x' \in C \cup merges(C) \cup \{x\}} d(f(x'), y)

Here d is the cross-entropy of the target less the number of tokens that x gets right before its
first mistake, and in it the tokens up to the one after that mistake weigh more than the others: in
a free run, what comes after a mistake is said in another context. For the same reason tokens beyond
a horizon behind that mistake are not read at all, until it has moved on.

The start is the likeliest of some prompts made of the target's near neighbours
(`dlmi.tokens.neighbours`), or of random ones. Each step tries a few swaps of a position i to a
token v, drawn from the K that the gradient at x promises most of at each position; swaps near the
end are drawn more often, as fewer tokens have to be read again after them, and at first only the
last positions are searched at all, a window behind a beginning that the LM has read once. Those
that lower d are put together, the best two, the best three and so on, and the best of all is taken.
As long as none is better, x and so its gradient stay the same: it is not computed again, and no
swap is tried twice. After some steps without success the window is widened, to the whole prompt in
the end. Then the search steps aside: it moves to the best prompt that it has seen beside x, though
that is worse, and does not take back what it has swapped until it has found a new best prompt.

Axes: N prompt tokens, W of them in the window, M target tokens, H of them before the horizon,
V tokens a prompt may hold, K swaps per position, C candidates, E examples.
"""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dlmi.methods.base import Search, Step
from dlmi.methods.slot import Slot
from dlmi.methods.swaps import count_right, draw_swaps, merge_swaps, token_weights
from dlmi.scoring.passes import NO_SWAP, Pass, Scores, Steps, Swaps
from dlmi.targets.context import Example
from dlmi.tokens.neighbours import echo_prompts

_SWAPS_PER_POSITION = 64
_MERGED_SWAPS = 6  # of those that help, at most so many are put together
_PATIENCE = 6  # steps without a better prompt before the search steps aside
_KICKED_SHARE = 0.2  # of the positions, where no swap is possible at all


@dataclass
class Candidate:
    """A prompt that was scored."""

    ids: Tensor  # the prompt, (N,)
    score: float  # weighted cross-entropy less right tokens; infinite before it is read
    output_ids: Tensor  # what teacher forcing decodes, up to the horizon, (H,)


@dataclass
class SwapState:
    """Where a search stands."""

    at: Candidate  # the prompt whose swaps are tried
    window: int  # positions at the end that are searched, W
    # Target tokens that `at` gets right before its first mistake, of each example
    right: list[int] = field(default_factory=list)
    scored_on: list[str] = field(default_factory=list)  # the examples that it was scored on
    best: Candidate | None = None  # the best prompt so far
    best_right: int = 0  # tokens that it gets right before its first mistake, over all examples
    # Tokens still to be tried, (W, K); None: the gradient has to be asked
    swaps: Tensor | None = None
    waited: int = 0  # steps without a better prompt
    aside: Candidate | None = None  # the best prompt seen beside `at`
    barred: Tensor | None = None  # swaps that are not to be taken back, (.., 2): position and token


@dataclass(frozen=True)
class SwapSearch(Search[SwapState]):
    """Greedy swaps, by default from a start that echoes the target.

    Args:
        start_from: Of which prompts the likeliest is the start: `echo` (near neighbours of the
            target's tokens, in its order) or `random` tokens.
        num_starts: How many of them are looked at.
        width: Swaps that a step tries.
        window: Positions at the end of the prompt that are searched first; more when nothing helps.
        horizon: Tokens of the target that are read from the first mistake on.
        norm_gradient_scale: Factor on gradients at the LM's norm layers; 1 leaves them alone.
    """

    start_from: Literal["echo", "random"] = "echo"
    num_starts: int = 16
    width: int = 24
    window: int = 24
    horizon: int = 4
    norm_gradient_scale: float = 0.85

    state_type = SwapState

    def starts(self, slot: Slot) -> Tensor:
        """They differ in the window alone: so they cost less."""
        if self.start_from == "echo":
            ids = echo_prompts(slot.tokens, slot.length, self.num_starts, slot.rng)
        else:
            ids = slot.tokens.random_ids(self.num_starts, slot.length, slot.rng)
        before = max(slot.length - self.window, 0)
        ids[:, :before] = ids[-1, :before].clone()
        return ids

    def begin(self, slot: Slot, prompt_ids: Tensor) -> SwapState:
        """At a prompt that has yet to be scored."""
        window = min(self.window, slot.length) if slot.can_narrow else slot.length
        return SwapState(Candidate(prompt_ids, torch.inf, prompt_ids[:0]), window)

    def prompt_ids(self, slot: Slot, state: SwapState) -> Tensor:
        """The best prompt of the search."""
        return (state.best or state.at).ids

    def step(self, slot: Slot, state: SwapState) -> Steps[tuple[Step, SwapState]]:
        """Try some swaps; where nothing helps any more, leave the prompt."""
        examples = [example.id for example in slot.examples]
        if state.scored_on != examples:  # scores on other examples cannot be compared
            state = SwapState(state.at, state.window, [0] * len(examples), examples)
            first = yield from self._measured(slot, state, state.at.ids)
            yield from self._move(slot, state, first)
        if state.swaps is None:
            state.swaps = yield from self._promising(slot, state)
        if state.waited >= _PATIENCE or bool((state.swaps == NO_SWAP).all()):
            yield from self._leave(slot, state)
        else:
            yield from self._try(slot, state)
        is_exact = state.right == [len(example.ids) for example in slot.examples]
        loss = torch.tensor(state.at.score + sum(state.right) / len(state.right))
        found_ids = state.at.ids if is_exact else None
        return Step(loss, self._whole_output(slot, state), found_ids=found_ids), state

    def _try(self, slot: Slot, state: SwapState) -> "Generator[Pass, Scores, None]":
        """Draw swaps, put together those that help, and move to the best if it is better."""
        at = state.at
        ids = self._drawn(slot, state)
        if len(ids) == 0:
            return
        found = yield from self._score(slot, state, ids, at.ids)
        better = sorted((c for c in found if c.score < at.score), key=lambda c: c.score)
        if better:
            swapped = torch.stack([candidate.ids for candidate in better])
            merged = merge_swaps(
                at.ids, swapped, _MERGED_SWAPS, lambda ids: len(slot.surviving(ids[None])) > 0
            )
            if len(merged):
                found += yield from self._score(slot, state, merged, at.ids)
        best = min(found, key=lambda c: c.score)
        if best.score < at.score and slot.must_confirm:
            best = yield from self._measured(slot, state, best.ids)
        if best.score < at.score:
            yield from self._move(slot, state, best)
        else:
            state.waited += 1
            if state.aside is None or best.score < state.aside.score:
                state.aside = best

    def _leave(self, slot: Slot, state: SwapState) -> "Generator[Pass, Scores, None]":
        """Search more positions, else go to the best prompt beside, else anywhere."""
        if state.window < slot.length:
            state.window = min(2 * state.window, slot.length)
            state.swaps, state.waited = None, 0
        elif state.aside is not None:
            yield from self._move(slot, state, state.aside)
        else:
            kicked = yield from self._measured(slot, state, self._kicked(slot, state)[0])
            yield from self._move(slot, state, kicked)

    def _move(self, slot: Slot, state: SwapState, to: Candidate) -> "Generator[Pass, Scores, None]":
        """Go to a prompt; where it gets other tokens right, its score is another."""
        before = state.at.ids
        right = self._right(slot, state, to)
        is_known = right == state.right
        while not is_known:
            state.right = right  # other weights and another horizon
            to = yield from self._measured(slot, state, to.ids)
            found = self._right(slot, state, to)
            # More may be right beyond the old horizon; fewer is a tie that rounding has broken.
            is_known = all(new <= old for new, old in zip(found, right, strict=True))
            right = [max(pair) for pair in zip(found, right, strict=True)]
        state.at, state.swaps, state.waited, state.aside = to, None, 0, None
        total = sum(state.right)
        best = state.best
        if best is None or (total, -to.score) >= (state.best_right, -best.score):
            state.best, state.best_right, state.barred = to, total, None
        else:  # bar the way back
            positions = (to.ids != before).nonzero()[:, 0]
            left = torch.stack([positions, before[positions]], dim=-1)
            state.barred = left if state.barred is None else torch.cat([state.barred, left])

    def _promising(self, slot: Slot, state: SwapState) -> Steps[Tensor]:
        """The swaps that the gradient promises most of, (W, K)."""
        scores = yield self._pass(slot, state, state.at.ids[None], None)
        assert scores.swap_ids is not None
        return scores.swap_ids

    def _swaps(self, slot: Slot, state: SwapState) -> Swaps:
        """All but no swap at all, and the way back to where the search has been."""
        first = slot.length - state.window
        own = torch.stack([torch.arange(state.window), state.at.ids[first:]], dim=-1)
        barred = [own]
        if state.barred is not None:
            barred.append(state.barred[state.barred[:, 0] >= first] - torch.tensor([first, 0]))
        return Swaps(slot.tokens, _SWAPS_PER_POSITION, torch.cat(barred))

    def _drawn(self, slot: Slot, state: SwapState) -> Tensor:
        """Swaps that were not tried yet, (C, N); the more has to be read after one, the rarer.

        One that does not round-trip, where it must, is replaced by another.
        """
        assert state.swaps is not None
        first = slot.length - state.window
        behind = torch.arange(state.window, 0, -1)  # tokens from each position on
        examples = self._examples(slot, state, state.at.ids)
        costs = sum(behind + len(example.ids) - 1 for example in examples)
        rarity = torch.as_tensor(costs) ** 2
        found = state.at.ids.repeat(0, 1)
        while len(found) < self.width:
            rows, drawn = draw_swaps(state.swaps, rarity, self.width - len(found), slot.rng)
            if len(rows) == 0:
                break
            ids = state.at.ids.repeat(len(rows), 1)
            ids[torch.arange(len(rows)), first + rows] = drawn
            found = torch.cat([found, slot.surviving(ids)])
        return found

    def _kicked(self, slot: Slot, state: SwapState) -> Tensor:
        """The prompt with a few tokens changed at random, (1, N)."""
        count = max(1, round(_KICKED_SHARE * slot.length))
        order = torch.rand(slot.length, generator=slot.rng).argsort()
        ids = state.at.ids.clone()
        ids[order[:count]] = slot.tokens.random_ids(1, count, slot.rng)[0]
        return slot.tokens.repaired(ids[None])

    def _examples(self, slot: Slot, state: SwapState, like_ids: Tensor) -> list[Example]:
        """What the window is read with: the prompt before it, and targets up to the horizon."""
        first = slot.length - state.window
        narrowed = []
        for example, right in zip(slot.examples, state.right, strict=True):
            context = example.context
            if first > 0:
                context = context.narrowed(like_ids.tolist(), first)
            ids = example.ids[: right + self.horizon]
            narrowed.append(replace(example, ids=ids, context=context))
        return narrowed

    def _pass(self, slot: Slot, state: SwapState, ids: Tensor, like_ids: Tensor | None) -> Pass:
        """Prompts, (C, N), as variations of one; without one, the gradient of a single prompt."""
        first = slot.length - state.window
        examples = self._examples(slot, state, ids[0] if like_ids is None else like_ids)
        pairs = zip(state.right, examples, strict=True)
        weights = [token_weights(right, len(example.ids)) for right, example in pairs]
        return Pass(
            ids[:, first:],
            examples,
            swaps=self._swaps(slot, state) if like_ids is None else None,
            token_weights=torch.cat(weights),
            like_ids=None if like_ids is None else like_ids[first:],
            norm_gradient_scale=self.norm_gradient_scale,
        )

    def _measured(self, slot: Slot, state: SwapState, ids: Tensor) -> Steps[Candidate]:
        """One prompt, (N,), scored in the dtype of measurements."""
        [candidate] = yield from self._score(slot, state, ids[None], ids, is_measured=True)
        return candidate

    def _score(
        self, slot: Slot, state: SwapState, ids: Tensor, like_ids: Tensor, is_measured: bool = False
    ) -> Steps[list[Candidate]]:
        """Prompts, (C, N), that are variations of one, scored."""
        asked = self._pass(slot, state, ids, like_ids)
        scores = yield replace(asked, is_measured=is_measured)
        right = torch.stack(self._rights(slot, state, scores.output_ids)).sum(0)  # (C,)
        values: list[Any] = (scores.losses - right / len(slot.examples)).tolist()
        return [Candidate(*c) for c in zip(ids, values, scores.output_ids, strict=True)]

    def _rights(self, slot: Slot, state: SwapState, output_ids: Tensor) -> list[Tensor]:
        """Tokens before the first mistake in each example, (C,) each of (C, H)."""
        wanted = [
            torch.tensor(example.ids[: right + self.horizon])
            for example, right in zip(slot.examples, state.right, strict=True)
        ]
        said = torch.split(output_ids, [len(ids) for ids in wanted], dim=-1)
        return [count_right(*pair) for pair in zip(said, wanted, strict=True)]

    def _right(self, slot: Slot, state: SwapState, candidate: Candidate) -> list[int]:
        return [int(right) for right in self._rights(slot, state, candidate.output_ids)]

    def _whole_output(self, slot: Slot, state: SwapState) -> Tensor:
        """What teacher forcing decodes after `at`, (M,); -1 beyond the horizon."""
        parts, start = [], 0
        for example, right in zip(slot.examples, state.right, strict=True):
            length = min(right + self.horizon, len(example.ids))
            part = torch.full((len(example.ids),), -1)
            part[:length] = state.at.output_ids[start : start + length]
            parts.append(part)
            start += length
        return torch.cat(parts)
