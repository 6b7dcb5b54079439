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

from dataclasses import dataclass

from torch import Tensor

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.estimators.score_function import (
    BaselineName,
    moving_average,
    sample_log_probs,
    score_function_surrogate,
)
from dlmi.estimators.soft_embedding import sample_columns
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.methods.base import Relaxation, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps


@dataclass
class REINFORCEState:
    """What is kept between steps."""

    average: Tensor | None = None  # the moving average of the loss, (); None before the first step


@dataclass(frozen=True)
class REINFORCE(Relaxation[REINFORCEState]):
    """The score function: no gradient through the LM.

    Args:
        num_samples: Hard prompts per step, S.
        baseline: What is subtracted from the loss: its moving average (`ema`), the mean of the
            other samples (`rloo`), nothing (`none`), or what the DLMI authors' code does
            (`as_code`).
        ema_decay: Weight of the old average, except in `as_code`.
        teacher_forcing: Feed the target's own prefix; else run freely.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax), `hinge` or `mellowmax`
            (log mean exp of the tokens' cross-entropies: the worst token counts most).
        lr: Adam's learning rate.
    """

    num_samples: int = 8
    baseline: BaselineName = "ema"
    ema_decay: float = 0.9
    teacher_forcing: bool = False
    loss: LossName = "cross_entropy"
    lr: float = 0.1

    state_type = REINFORCEState

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        check_at_least_one("model.method", num_samples=self.num_samples)
        check_positive("model.method", lr=self.lr)
        if self.baseline == "rloo" and self.num_samples < 2:
            raise InputError(
                "Expected `model.method.num_samples` to be at least 2 with `model.method.baseline: "
                f"rloo`, but got {self.num_samples}: there is no other sample to compare with."
            )
        if not 0 <= self.ema_decay < 1:
            raise InputError(
                "Expected `model.method.ema_decay` to be at least 0 and below 1, but got "
                f"{self.ema_decay}."
            )

    def step(self, slot: Slot, state: REINFORCEState) -> Steps[tuple[Step, REINFORCEState]]:
        """A surrogate whose gradient is the estimate; reports the mean loss of the samples."""
        logits = slot.params["Z"]
        columns = sample_columns(logits, self.num_samples, slot.seed())  # (S, N)
        prompts = slot.tokens.ids(columns)
        scores = yield Pass(prompts, slot.examples, self.loss, self.teacher_forcing)
        losses = scores.losses.to(logits)
        log_probs = sample_log_probs(logits, columns)
        average, kept = moving_average(self.baseline, state.average, losses.mean(), self.ema_decay)
        surrogate = score_function_surrogate(losses, log_probs, self.baseline, average)
        step = Step(surrogate, scores.output_ids[0], value=losses.mean())
        return step, REINFORCEState(kept)

    def soft_prompt(self, slot: Slot, state: REINFORCEState) -> SoftPrompt:
        """softmax(Z), which hard prompts are drawn from."""
        logits = slot.params["Z"]
        return SoftPrompt(logits, logits.new_ones(slot.length))
