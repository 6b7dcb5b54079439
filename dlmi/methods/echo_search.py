r"""EchoSearch: our recipe. Start from an echo of the target, then swap what the gradient promises.

.. math::
    x^{(0)} = \arg\min_{x \in echoes(y)} d(f(x), y), \quad
    x \leftarrow \arg\min_{x' \in C(x) \cup merges(C(x)) \cup \{x\}} d(f(x'), y)

The start is the likeliest of some prompts made of the target's near neighbours (`dlmi.echo`). From
there it is a discrete search (`dlmi.refinement`) whose gradients may be scaled at the norm layers.
Nothing is relaxed: the prompt that is measured is the one that was optimised. Z holds it as one-hot
rows.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dlmi.candidates import score_candidates
from dlmi.echo import echo_prompts
from dlmi.errors import check_at_least_one
from dlmi.inverter import Inverter
from dlmi.passes import StepLosses
from dlmi.refinement import DEFAULT_HORIZON, DEFAULT_WINDOW, dearest_step
from dlmi.slots import Slot
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens


class EchoSearch(Inverter):
    """Greedy swaps from a start that echoes the target.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: search steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        start: Of which prompts the likeliest is taken: `echo` (near neighbours of the target's
            tokens, in its order) or `random` tokens.
        starts: How many of them are looked at.
        refine_width: Swaps that a step tries.
        window: Positions at the end of the prompt that are searched first; more when nothing helps.
        horizon: Tokens of the target that the search reads from the first mistake on.
        eval_every: Steps between two greedy decodes of the best prompt.
        prompt_bos: Put BoS before the prompt, in the search and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        norm_gradient_scale: Factor on gradients at the LM's norm layers; 1 leaves them alone.
        seed: With the target's id it fixes the draws. On the command line: `seed_everything`.
    """

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 500,
        token_budget: int | None = None,
        start: Literal["echo", "random"] = "echo",
        starts: int = 16,
        refine_width: int = 24,
        window: int = DEFAULT_WINDOW,
        horizon: int = DEFAULT_HORIZON,
        eval_every: int = 4,
        prompt_bos: bool = False,
        allowed_tokens: AllowedTokens = "all",
        forbid_target_tokens: ForbiddenTokens = "none",
        norm_gradient_scale: float = 0.85,
        seed: int = 0,
    ) -> None:
        super().__init__(
            prompt_length,
            steps,
            token_budget,
            eval_every,
            prompt_bos,
            allowed_tokens,
            forbid_target_tokens,
            seed,
        )
        check_at_least_one("model", starts=starts, window=window, horizon=horizon)
        self.set_norm_gradient_scale(norm_gradient_scale)
        self.set_refinement(1.0, refine_width)
        self.refine_window, self.refine_horizon = window, horizon
        self.start = start
        self.starts = starts

    @property
    def can_share_prompts(self) -> bool:
        """No: losses on different examples cannot be compared."""
        return False

    def token_sets(self) -> list[AllowedTokens]:
        """No special tokens beside what `allowed_tokens` says: the LM reads them as commands."""
        return [*super().token_sets(), "no_special"]

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V), one-hot."""
        return {"Z": (self.prompt_length, len(self.vocabulary))}

    def initialise(self, slot: Slot) -> None:
        """The likeliest of the starts, which differ in the window alone: so they cost less."""
        columns = self._starts(slot)  # (C, N)
        before = max(self.prompt_length - self.refine_window, 0)
        columns[:, :before] = columns[-1, :before].clone()
        start_ids = self.mended(slot, self.vocabulary.ids(columns))  # (C, N)
        losses, _, tokens_read = score_candidates(
            self.lm, start_ids[0], start_ids, slot.target, prompt_bos=self.prompt_bos
        )
        slot.forward_tokens += tokens_read
        self._set(slot, self.vocabulary.columns(start_ids[losses.argmin()]))

    def _starts(self, slot: Slot) -> Tensor:
        shape = (self.starts, self.prompt_length)
        if self.start == "echo":
            return echo_prompts(self.vocabulary, slot.target, shape[1], shape[0], slot.generator)
        allowed = self.vocabulary.allowed_columns(slot.target)
        device = slot.generator.device
        picks = torch.randint(len(allowed), shape, generator=slot.generator, device=device)
        return allowed[picks.to(allowed.device)]

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """A search step; nothing is left to descend."""
        step = self.refinement.step(slots)
        for slot in slots:
            self._set(slot, self.refinement.columns(slot))
        return step

    def token_passes_per_step(self, target_length: int) -> int:
        """The gradient's pass and the candidates, in full."""
        return dearest_step(self.refine_width, self.prompt_length, target_length)

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The start, and from the first step on the prompt that the search has come to, (B, N)."""
        return self.argmax_prompt_ids(slots)

    def configure_optimizers(self) -> Optimizer:
        """One that has nothing to do: the search moves Z, which has no gradient."""
        return SGD(self.parameters(), lr=1.0)

    @torch.no_grad()
    def _set(self, slot: Slot, columns: Tensor) -> None:
        self.Z[slot.index].zero_().scatter_(-1, columns[:, None], 1.0)
