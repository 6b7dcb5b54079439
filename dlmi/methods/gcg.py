r"""GCG: greedy coordinate gradient, a discrete search that the gradient only guides.

.. math::
    C_i = top_k( -\nabla_{e_{x_i}} d(f(x), y) ), \quad
    x \leftarrow \arg\min_{x' \in B} d(f(x'), y)

Zou et al. 2023, with the defaults of nanoGCG. B holds `search_width` copies of x, each with
`n_replace` random positions changed to a random member of that position's top k. Every step costs
`search_width` forward passes, so compare it by token passes, not by steps. Z holds x as one-hot
rows; there is no relaxation, and the prompt that is measured is the one that was optimised.

`buffer_size` says what a step may lose: 0 takes the best candidate even if it is worse (the
original rule), 1 keeps x unless a candidate is better, more starts from that many prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlmi.candidates import score_candidates
from dlmi.errors import InputError, check_at_least_one
from dlmi.fluency import check_fluency
from dlmi.inverter import Inverter
from dlmi.losses import LossName
from dlmi.passes import StepLosses, target_pass
from dlmi.round_trip import surviving
from dlmi.slots import Slot
from dlmi.targets import Target
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens, Vocabulary


def propose_swaps(
    columns: Tensor,
    gradient: Tensor,
    topk: int,
    width: int,
    n_replace: int,
    generator: torch.Generator,
) -> Tensor:
    """Copies of a prompt with random positions set to random tokens that the gradient likes.

    Args:
        columns: The prompt, (N,).
        gradient: Of the loss with respect to its one-hot rows, (N, V); +inf bars a token.
        topk: Candidates per position.
        width: How many copies, C.
        n_replace: Positions changed in each.
        generator: Source of the draws.

    Returns:
        (C, N).
    """
    likely = (-gradient).topk(topk, dim=-1).indices  # (N, topk)
    device = columns.device
    order = torch.rand(width, len(columns), generator=generator, device=device).argsort(-1)
    positions = order[:, :n_replace]  # (C, n_replace), distinct in each row
    picks = torch.randint(topk, positions.shape, generator=generator, device=device)
    return columns.repeat(width, 1).scatter_(1, positions, likely[positions, picks])


class _Search(Optimizer):
    """Runs the backward pass, then lets the search move Z."""

    def __init__(self, params: Any, search: Callable[[], None]) -> None:
        super().__init__(params, {})
        self._search = search

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One search step of every slot."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._search()
        return loss


class _OneHotProduct(torch.autograd.Function):
    """One-hot rows times a matrix: a lookup; the gradient is that of the product."""

    @staticmethod
    def forward(ctx: Any, one_hot: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix)
        return matrix[one_hot.argmax(-1)].to(one_hot.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [matrix] = ctx.saved_tensors
        return gradient @ matrix.to(gradient.dtype).T, None


class GCG(Inverter):
    """Greedy coordinate gradient.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: search steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        search_width: Candidates per step.
        topk: Candidate tokens per position.
        n_replace: Positions changed in each candidate.
        buffer_size: 0: take the best candidate even if it is worse; 1: keep the current prompt
            unless a candidate is better; more: the same, from the best of that many random starts.
        init: First prompt: `x` (the token "x" over and over, if it may be used) or `random` tokens.
        allow_non_ascii: Let candidates hold tokens that are not printable ASCII.
        filter_ids: Drop candidates that do not survive decoding and encoding.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax) or `hinge`.
        eval_every: Steps between two greedy decodes of the discrete prompt.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        fluency: Weight of a penalty on prompts that the LM finds unlikely; 0 for none.
        norm_gradient_scale: Factor on gradients at the LM's norm layers; 1 leaves them alone.
        seed: With the target's id it fixes the draws. On the command line: `seed_everything`.
    """

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 250,
        token_budget: int | None = None,
        search_width: int = 512,
        topk: int = 256,
        n_replace: int = 1,
        buffer_size: int = 1,
        init: Literal["x", "random"] = "x",
        allow_non_ascii: bool = False,
        filter_ids: bool = True,
        loss: LossName = "cross_entropy",
        eval_every: int = 16,
        prompt_bos: bool = False,
        allowed_tokens: AllowedTokens = "all",
        forbid_target_tokens: ForbiddenTokens = "none",
        fluency: float = 0.0,
        norm_gradient_scale: float = 1.0,
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
        self.set_norm_gradient_scale(norm_gradient_scale)
        self.fluency = check_fluency(fluency, prompt_length)
        check_at_least_one("model", search_width=search_width, topk=topk, n_replace=n_replace)
        if n_replace > prompt_length:
            raise InputError(
                f"Expected `model.n_replace` to be at most `model.prompt_length` "
                f"({prompt_length}), but got {n_replace}."
            )
        if buffer_size < 0:
            raise InputError(
                f"Expected `model.buffer_size` to be at least 0, but got {buffer_size}."
            )
        self.search_width = search_width
        self.topk = topk
        self.n_replace = n_replace
        self.buffer_size = buffer_size
        self.init = init
        self.allow_non_ascii = allow_non_ascii
        self.filter_ids = filter_ids
        self.loss: LossName = loss

    def token_sets(self) -> list[AllowedTokens]:
        """No special tokens, and unless allowed none that are not printable ASCII."""
        own = ["no_special"] if self.allow_non_ascii else ["ascii", "printable"]
        return [*super().token_sets(), *own]

    def check_vocabulary(self, vocabulary: Vocabulary, targets: Sequence[Target]) -> None:
        """There must be `topk` tokens to choose from, for each target."""
        allowed = min(len(vocabulary.allowed_columns(target)) for target in targets)
        if self.topk > allowed:
            raise InputError(
                f"Expected `model.topk` to be at most {allowed} (the tokens of "
                f"{vocabulary.lm.name} that may be used), but got {self.topk}."
            )

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V), one-hot."""
        return {"Z": (self.prompt_length, len(self.vocabulary))}

    def initialise(self, slot: Slot) -> None:
        """The first prompt: x's, random tokens, or the best of a buffer of random ones."""
        allowed = self.vocabulary.allowed_columns(slot.target).to(slot.generator.device)
        count = max(self.buffer_size, 1)
        picks = torch.randint(
            len(allowed),
            (count, self.prompt_length),
            generator=slot.generator,
            device=allowed.device,
        )
        columns = allowed[picks]  # (count, N)
        x_id = self.lm.encode(" x")[-1]
        if self.init == "x" and self.vocabulary.allows(x_id, slot.target):
            columns[0] = self.vocabulary.columns(columns.new_tensor(x_id))
        columns = self.vocabulary.columns(self.mended(slot, self.vocabulary.ids(columns)))
        if slot.target.reasons:
            self.judge.reason([slot], self.vocabulary.ids(columns[:1]))
        losses, _ = self._score(slot, slot.target_at(), columns[0], columns)
        best = int(losses.argmin())
        slot.memory["loss"] = float(losses[best])
        self._set(slot, columns[best])

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """The loss of the current prompt; its gradient proposes the swaps."""
        matrix = self.prompt_matrix
        embeds = torch.stack([_OneHotProduct.apply(self.Z[s.index], matrix) for s in slots])  # type: ignore[no-untyped-call]
        losses, output_ids = target_pass(
            self.lm,
            slots,
            embeds[:, None],
            self.loss,
            prompt_bos=self.prompt_bos,
            fluency=self.fluency_term,
        )
        for slot, loss in zip(slots, losses.detach()[:, 0], strict=True):
            if slot.target.shared is not None:  # the prompt's loss on these examples is another
                slot.memory["loss"] = float(loss)
        return StepLosses(losses[:, 0], output_ids[:, 0])

    def token_passes_per_step(self, target_length: int) -> int:
        """The prompt forward and backward, what candidates share, and the candidates in full."""
        read = self.prompt_length + target_length - 1
        return 2 * read + self.prompt_length + self.search_width * read

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The current prompts, (B, N)."""
        return self.argmax_prompt_ids(slots)

    def configure_optimizers(self) -> Optimizer:
        """The search, as an optimiser."""
        return _Search(self.parameters(), self._search)

    def _search(self) -> None:
        for slot in self.active:
            parameter = self.Z[slot.index]
            gradient = parameter.grad
            if gradient is None:
                continue
            columns = parameter.argmax(-1)
            candidates = propose_swaps(
                columns,
                -self.vocabulary.bar_(-gradient, slot.target),
                self.topk,
                self.search_width,
                self.n_replace,
                slot.generator,
            )
            candidates = self._survivors(candidates, slot.target)
            if len(candidates) == 0:
                continue
            target = slot.target_at(slot.step - 1)  # as the gradient has just read it
            losses, output_ids = self._score(slot, target, columns, candidates)
            best = int(losses.argmin())
            if self.buffer_size == 0 or losses[best] < slot.memory["loss"]:
                slot.memory["loss"] = float(losses[best])
                self._set(slot, candidates[best])
                slot.is_promising = tuple(output_ids[best].tolist()) == target.ids

    def _score(
        self, slot: Slot, target: Target, columns: Tensor, candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses and teacher-forced outputs of candidates, charged to the slot."""
        losses, output_ids, tokens_read = score_candidates(
            self.lm,
            self.vocabulary.ids(columns),
            self.vocabulary.ids(candidates),
            target,
            self.loss,
            self.prompt_bos,
            self.fluency_term,
        )
        slot.forward_tokens += tokens_read
        return losses, output_ids

    def _survivors(self, candidates: Tensor, target: Target) -> Tensor:
        """The candidates that survive decoding and encoding; if none does, and none must, all."""
        must_round_trip = self.vocabulary.must_round_trip
        if not (self.filter_ids or must_round_trip):
            return candidates
        keep = surviving(self.vocabulary, candidates, target)
        if not keep.any() and not must_round_trip:
            return candidates
        return candidates[keep]

    def _set(self, slot: Slot, columns: Tensor) -> None:
        self.Z[slot.index].zero_().scatter_(-1, columns[:, None], 1.0)
