r"""REINFORCE: the score function, with no gradient through the LM at all.

.. math::
    x_i \sim softmax(Z_i), \quad
    g = \frac{1}{S} \sum_s (L(x^s) - b) \nabla_Z \log p_Z(x^s)

Williams 1992; a baseline of the DLMI paper. Prompts are hard samples, so a step costs forward
passes only. The gradient is unbiased and very noisy. b is a moving average of the loss (`ema`,
updated after its use) or the mean of the other samples (`rloo`). The DLMI authors' public code
(`as_code`) multiplies the mean loss by the mean log-probability instead, so that no sample gets
credit of its own; its average weighs the newest loss by 0.9 and is updated before its use.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dlmi.errors import InputError
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
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
        lr: Adam's learning rate.
    """

    num_samples: int = 8
    baseline: BaselineName = "ema"
    ema_decay: float = 0.9
    teacher_forcing: bool = False
    loss: LossName = "cross_entropy"
    lr: float = 0.1

    state_type = REINFORCEState
    ranges: ClassVar = {"ema_decay": "[0, 1)"}

    def __post_init__(self) -> None:
        """Raise `InputError` for settings that exclude each other."""
        super().__post_init__()
        if self.baseline == "rloo" and self.num_samples < 2:
            raise InputError(
                "Expected `model.method.num_samples` to be at least 2 with `model.method.baseline: "
                f"rloo`, but got {self.num_samples}: there is no other sample to compare with."
            )

    def step(self, slot: Slot, state: REINFORCEState) -> Steps[tuple[Step, REINFORCEState]]:
        """A surrogate whose gradient is the estimate; reports the mean loss of the samples."""
        Z = slot.params["Z"]
        columns = sample_columns(Z, self.num_samples, slot.seed())  # (S, N)
        prompts = slot.tokens.ids(columns)
        # The losses stay where Z is: they are weights of its gradient.
        asked = Pass(prompts, slot.examples, self.loss, self.teacher_forcing, is_seen=False)
        scores = yield asked
        losses, log_probs = scores.losses.to(Z), sample_log_probs(Z, columns)
        average, kept = moving_average(self.baseline, state.average, losses.mean(), self.ema_decay)
        surrogate = score_function_surrogate(losses, log_probs, self.baseline, average)
        step = Step(surrogate, scores.output_ids[0], value=losses.mean())
        return step, REINFORCEState(kept)

    def soft_prompt(self, slot: Slot, state: REINFORCEState) -> SoftPrompt:
        """softmax(Z), which hard prompts are drawn from."""
        Z = slot.params["Z"]
        return SoftPrompt(Z, Z.new_ones(slot.length))
