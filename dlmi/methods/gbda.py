r"""GBDA: Gumbel-Softmax prompts at a temperature that is not learned.

.. math::
    p_i = softmax((Z_i + g_i) / \tau), \quad h_i = p_i E, \quad \min_Z E_g [ d(f(h_1 .. h_N), y) ]

Guo et al. 2021, "Gradient-based Adversarial Attacks against Text Transformers", as the DLMI paper
adapts it to inversion: Z from N(0, 1), 8 samples, free greedy run, no similarity or fluency terms.
It is DLMI without learned temperatures and without teacher forcing. `final_samples` is the last
step of the original; `tau_end` anneals the temperature, as later users of GBDA do.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dlmi.errors import InputError
from dlmi.estimators.sampling import EstimatorName
from dlmi.estimators.soft_embedding import sample_columns
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.estimators.temperature import annealed_temperature
from dlmi.methods.base import Relaxation, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps


@dataclass(frozen=True)
class GBDA(Relaxation[None]):
    """Gumbel-Softmax prompts at a fixed or annealed temperature.

    Args:
        tau: Temperature, at the start.
        tau_end: Temperature at the end of the budget, on a geometric path; unset: `tau` all along.
        final_samples: Hard prompts drawn from softmax(Z) when the budget is spent; the best counts.
        num_samples: Gumbel samples per step, S; their losses are averaged.
        estimator: How rows are drawn and differentiated: `gumbel_softmax` (relaxed rows), or
            one-hot rows with the gradient of `straight_through`, `gumbel_rao` or `reinmax`.
        rao_draws: Conditional draws per sample of `gumbel_rao`, K.
        teacher_forcing: Feed the target's own prefix; else run freely.
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
        lr: Adam's learning rate.
    """

    tau: float = 1.0
    tau_end: float | None = None
    final_samples: int = 0
    num_samples: int = 8
    estimator: EstimatorName = "gumbel_softmax"
    rao_draws: int = 10
    teacher_forcing: bool = False
    loss: LossName = "cross_entropy"
    lr: float = 0.1

    ranges: ClassVar = {"final_samples": "[0, inf)"}

    def __post_init__(self) -> None:
        """Raise `InputError` for settings that exclude each other."""
        super().__post_init__()
        if self.estimator == "reinmax" and min(self.tau, self.tau_end or self.tau) < 1:
            raise InputError(
                "Expected `model.method.tau` and `model.method.tau_end` of at least 1 with "
                f"`model.method.estimator: reinmax`, but got {self.tau} and {self.tau_end}."
            )

    def soft_prompt(self, slot: Slot, state: None) -> SoftPrompt:
        """S samples of the rows of Z, at the temperature of this point of the budget."""
        Z = slot.params["Z"]
        now = annealed_temperature(self.tau, self.tau_end or self.tau, slot.progress)
        tau = Z.new_full((slot.length,), now)
        return SoftPrompt(Z, tau, self.estimator, self.num_samples, slot.seed(), self.rao_draws)

    def step(self, slot: Slot, state: None) -> Steps[tuple[Step, None]]:
        """The loss of the target, averaged over S samples."""
        prompt = self.soft_prompt(slot, state)
        scores = yield Pass(prompt, slot.examples, self.loss, self.teacher_forcing)
        return Step(scores.losses.mean(), scores.output_ids[0]), None

    def last_prompts(self, slot: Slot, state: None) -> Tensor:
        """Hard draws from softmax(Z), (C, N)."""
        Z = slot.params["Z"].detach()
        columns = sample_columns(Z, self.final_samples, slot.seed("final samples"))
        return slot.tokens.repaired(slot.tokens.ids(columns), Z)
