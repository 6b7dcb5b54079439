"""What a method is: the holes that each fills, and what all of them share.

A method fills five holes: which tensors a slot has (`parameter_shapes`), how they start
(`initialise`), the loss of each slot (`losses`), what that costs (`token_passes_per_step`), and the
discrete prompt that they stand for (`prompt_ids`). The discrete prompt is what is measured, always.
How a queue of targets is led through the slots is the business of `Inverter`.

Axes: B slots in flight, N prompt tokens, M target tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from dlmi.data import TargetDataModule
from dlmi.errors import InputError, check_positive
from dlmi.fluency import Fluency
from dlmi.judge import Judge
from dlmi.lm import FrozenLM
from dlmi.passes import StepLosses
from dlmi.prompt_forms import Relaxation
from dlmi.refinement import (
    DEFAULT_HORIZON,
    DEFAULT_WINDOW,
    Refinement,
    check_refinement,
    dearest_step,
)
from dlmi.round_trip import mend_prompts
from dlmi.slots import Budget, Slot
from dlmi.targets import Target
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens, Vocabulary


class Method(LightningModule, ABC):
    """Slots with their tensors, and the equations that move them.

    Attributes:
        prompt_length: Tokens of a prompt, N.
        budget: What a target may use.
        prompt_bos: Whether BoS stands before the prompt.
        allowed_tokens: What a prompt may hold.
        forbid_target_tokens: What it may not hold of its target.
        fluency: Weight of the penalty on unlikely prompts; 0 for none.
        norm_gradient_scale: Factor on gradients at the LM's norm layers.
        refine_after: Share of the budget after which the best discrete prompt is refined.
        refine_width: Swaps that a step of the refinement tries.
        refine_window: Positions at the end of a prompt that it searches first.
        refine_horizon: Tokens of the target that it reads from the first mistake on.
        slots: The targets in flight; None where there is none.
        Z: A tensor of each slot.
    """

    prompt_length: int
    budget: Budget
    prompt_bos: bool
    allowed_tokens: AllowedTokens
    forbid_target_tokens: ForbiddenTokens
    slots: list[Slot | None]
    Z: nn.ParameterList
    fluency: float = 0.0
    norm_gradient_scale: float = 1.0
    refine_after: float = 1.0
    refine_width: int = 16
    refine_window: int = DEFAULT_WINDOW
    refine_horizon: int = DEFAULT_HORIZON
    _vocabulary: Vocabulary | None = None
    _fluency_term: Fluency | None = None

    # ---- what a method fills in

    @abstractmethod
    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of one slot by name: Z, and Phi where temperatures are learned."""

    @abstractmethod
    def initialise(self, slot: Slot) -> None:
        """Fill a slot's tensors for a new target, in place, with the slot's own generator."""

    @abstractmethod
    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """One loss per slot, to be descended; charges the slots for the passes it makes."""

    @abstractmethod
    def token_passes_per_step(self, target_length: int) -> int:
        """What one step costs a target of that many tokens, at most."""

    @abstractmethod
    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The discrete prompts that the slots stand for now, (B, N)."""

    def final_prompt_ids(self, slot: Slot) -> Tensor | None:
        """More discrete prompts to try when the budget is spent, (C, N); none by default."""
        return None

    def diagnostics(self, slot: Slot) -> dict[str, Tensor]:
        """Per-position numbers worth a look, such as `tau`, (N,); for TensorBoard and rows."""
        return {}

    def relaxation(self, slot: Slot) -> Relaxation | None:
        """The distributions over tokens that a slot stands for, where the method has them."""
        return None

    def token_sets(self) -> list[AllowedTokens]:
        """Sets that a prompt's tokens must be in: what `allowed_tokens` says, and the method."""
        return [self.allowed_tokens]

    def check_vocabulary(self, vocabulary: Vocabulary, targets: Sequence[Target]) -> None:
        """Raise `InputError` where the method's settings do not fit the tokens of a run."""

    # ---- what methods share

    @property
    def data(self) -> TargetDataModule:
        """The data module of the run."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TargetDataModule):
            raise InputError("Expected `Trainer.fit` to get a TargetDataModule as `datamodule`.")
        return data

    @property
    def lm(self) -> FrozenLM:
        """The frozen LM."""
        return self.data.lm

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens that the run's prompts may hold, by column of Z."""
        return self.vocabulary_of(self.lm)

    def vocabulary_of(self, lm: FrozenLM) -> Vocabulary:
        """The same before the run: the tokens of an LM that a prompt may hold."""
        if self._vocabulary is None or self._vocabulary.lm is not lm:
            self._vocabulary = Vocabulary(lm, self.token_sets(), self.forbid_target_tokens)
        return self._vocabulary

    @property
    def fluency_term(self) -> Fluency | None:
        """The penalty on unlikely prompts, where there is one."""
        return self.fluency_term_of(self.vocabulary)

    def fluency_term_of(self, vocabulary: Vocabulary) -> Fluency | None:
        """The same before the run: raises `InputError` for an LM that it does not fit."""
        if not self.fluency:
            return None
        if self._fluency_term is None or self._fluency_term.vocabulary is not vocabulary:
            self._fluency_term = Fluency(vocabulary, self.fluency)
        return self._fluency_term

    @property
    def prompt_matrix(self) -> Tensor:
        """What each token embeds to, and is read out by where there is a penalty, (V, d ..)."""
        term = self.fluency_term
        return self.vocabulary.matrix if term is None else term.matrix

    def set_norm_gradient_scale(self, factor: float) -> None:
        """Scale gradients at the LM's norm layers, in every step."""
        check_positive("model", norm_gradient_scale=factor)
        self.norm_gradient_scale = factor

    def set_refinement(self, refine_after: float, refine_width: int) -> None:
        """Refine the best prompt from a share of the budget on."""
        check_refinement(refine_after, refine_width)
        self.refine_after, self.refine_width = refine_after, refine_width

    @property
    def refinement(self) -> Refinement:
        """The search that follows, where there is one."""
        return Refinement(
            self.vocabulary,
            self.refine_width,
            prompt_bos=self.prompt_bos,
            fluency=self.fluency_term,
            window=self.refine_window,
            horizon=self.refine_horizon,
        )

    @property
    def can_share_prompts(self) -> bool:
        """Whether one prompt may be for many examples, a few of them at a step."""
        return self.refine_after == 1

    def dearest_step(self, target_length: int) -> int:
        """Token passes of a step of either kind, at most."""
        relaxed = self.token_passes_per_step(target_length)
        if self.refine_after == 1:
            return relaxed
        refined = dearest_step(self.refine_width, self.prompt_length, target_length)
        return max(relaxed, refined)

    def is_refined(self, slot: Slot) -> bool:
        """Whether a slot is past its relaxation."""
        return self.refine_after < 1 and self.budget.share_used(slot) >= self.refine_after

    @property
    def judge(self) -> Judge:
        """What the discrete prompts are measured by."""
        return Judge(self.lm, self.prompt_bos, self.vocabulary.must_round_trip)

    @property
    def active(self) -> list[Slot]:
        """The slots in flight."""
        return [slot for slot in self.slots if slot is not None]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Z, softmax and loss are float32 whatever the LM is, and float64 if it is float64."""
        return torch.float64 if self.lm.dtype == torch.float64 else torch.float32

    def argmax_prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The ids of the largest logits, mended where they must be, (B, N)."""
        columns = [self.Z[slot.index].detach().argmax(-1) for slot in slots]
        rows = zip(slots, columns, strict=True)
        return torch.cat([self.mended(slot, self.vocabulary.ids(c)[None]) for slot, c in rows])

    def mended(self, slot: Slot, prompt_ids: Tensor) -> Tensor:
        """Prompts of a slot, (R, N), that survive decoding and encoding where they must."""
        if not self.vocabulary.must_round_trip:
            return prompt_ids

        def preferences() -> Tensor | None:
            relaxation = self.relaxation(slot)
            return None if relaxation is None else relaxation.logits.detach()

        return mend_prompts(self.vocabulary, slot, prompt_ids, preferences)

    def forget_moments(self, slot: Slot) -> None:
        """Let the optimiser start anew on a slot's tensors, as for a new target."""
        for name in self.parameter_shapes():
            for optimizer in self.trainer.optimizers:
                optimizer.state.pop(getattr(self, name)[slot.index], None)
