r"""REINFORCE: the score function, with no gradient through the LM at all.

.. math::
    x_i \sim softmax(Z_i), \quad
    g = \frac{1}{S} \sum_s (L(x^s) - b) \nabla_Z \log p_Z(x^s)

Williams 1992; the baseline that the DLMI paper compares with. Prompts are hard samples, so there is
no soft embedding and no temperature, and a step costs forward passes only. The gradient is unbiased
and very noisy; b is an exponential moving average of the loss (`ema`, updated after its use), the
mean of the other samples (`rloo`), or what the DLMI authors' public code computes (`as_code`): the
batch-mean loss times the batch-mean log-probability, against an average that weighs the newest
loss by 0.9 and is updated before its use, so that credit is not given per sample.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.fluency import check_fluency
from dlmi.inverter import Inverter
from dlmi.losses import LossName
from dlmi.passes import StepLosses, target_pass
from dlmi.prompt_forms import Relaxation
from dlmi.relaxation import row_entropy
from dlmi.score_function import (
    BaselineName,
    moving_average,
    sample_log_probs,
    score_function_surrogate,
)
from dlmi.slots import Slot
from dlmi.soft_embedding import sample_columns
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens


class REINFORCE(Inverter):
    """Score-function gradient on hard samples.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        num_samples: Hard samples per step, S.
        baseline: `ema`, `rloo` (leave one out), `as_code` (the authors' code) or `none`.
        ema_decay: Weight of the old average in `ema`.
        teacher_forcing: Feed the target's own prefix; else run freely on greedy tokens.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax) or `hinge`.
        lr: Adam's learning rate.
        eval_every: Steps between two greedy decodes of the discrete prompt.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        fluency: Weight of a penalty on prompts that the LM finds unlikely; 0 for none.
        refine_after: Share of the budget after which the best discrete prompt is refined by
            swaps (`dlmi.refinement`); 1 for never.
        refine_width: Swaps that a step of the refinement tries.
        seed: With the target's id it fixes the samples. On the command line: `seed_everything`.
    """

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 2048,
        token_budget: int | None = None,
        num_samples: int = 8,
        baseline: BaselineName = "ema",
        ema_decay: float = 0.9,
        teacher_forcing: bool = False,
        loss: LossName = "cross_entropy",
        lr: float = 0.1,
        eval_every: int = 16,
        prompt_bos: bool = False,
        allowed_tokens: AllowedTokens = "all",
        forbid_target_tokens: ForbiddenTokens = "none",
        fluency: float = 0.0,
        refine_after: float = 1.0,
        refine_width: int = 16,
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
        self.set_refinement(refine_after, refine_width)
        self.fluency = check_fluency(fluency, prompt_length)
        check_at_least_one("model", num_samples=num_samples)
        check_positive("model", lr=lr)
        if baseline == "rloo" and num_samples < 2:
            raise InputError(
                "Expected `model.num_samples` to be at least 2 with `model.baseline: rloo`, but "
                f"got {num_samples}: there is no other sample to compare with."
            )
        if not 0 <= ema_decay < 1:
            raise InputError(
                f"Expected `model.ema_decay` to be at least 0 and below 1, but got {ema_decay}."
            )
        self.num_samples = num_samples
        self.baseline: BaselineName = baseline
        self.ema_decay = ema_decay
        self.teacher_forcing = teacher_forcing
        self.loss: LossName = loss
        self.lr = lr

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V)."""
        return {"Z": (self.prompt_length, len(self.vocabulary))}

    def initialise(self, slot: Slot) -> None:
        """Z from N(0, 1)."""
        self.vocabulary.bar_(self.Z[slot.index].normal_(generator=slot.generator), slot.target)

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """The surrogate of each slot; the loss reported is the mean over its samples."""
        draws = [sample_columns(self.Z[s.index], self.num_samples, s.noise_seed()) for s in slots]
        columns = torch.stack(draws)  # (B, S, N)
        with torch.no_grad():
            losses, output_ids = target_pass(
                self.lm,
                slots,
                F.embedding(columns, self.prompt_matrix),
                self.loss,
                self.teacher_forcing,
                self.prompt_bos,
                fluency=self.fluency_term,
            )
        surrogates = torch.stack(
            [self._surrogate(*row) for row in zip(slots, columns, losses, strict=True)]
        )
        return StepLosses(surrogates, output_ids[:, 0], losses.mean(dim=1))

    def _surrogate(self, slot: Slot, columns: Tensor, losses: Tensor) -> Tensor:
        log_probs = sample_log_probs(self.Z[slot.index], columns)
        average, slot.memory["average"] = moving_average(
            self.baseline, slot.memory.get("average"), losses.mean(), self.ema_decay
        )
        return score_function_surrogate(losses, log_probs, self.baseline, average)

    def token_passes_per_step(self, target_length: int) -> int:
        """S hard prompts, forward."""
        return self.num_samples * (self.prompt_length + target_length - 1)

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The most probable token of each position, (B, N)."""
        return self.argmax_prompt_ids(slots)

    @torch.no_grad()
    def diagnostics(self, slot: Slot) -> dict[str, Tensor]:
        """Entropy of each position's distribution."""
        logits: Tensor = self.Z[slot.index]
        return {"entropy": row_entropy(logits, logits.new_ones(()))}

    def relaxation(self, slot: Slot) -> Relaxation:
        """softmax(Z), which hard prompts are drawn from."""
        logits: Tensor = self.Z[slot.index]
        return Relaxation(logits, logits.new_ones(self.prompt_length))

    def configure_optimizers(self) -> Optimizer:
        """Adam on Z."""
        return Adam(self.parameters(), lr=self.lr, fused=True)
