r"""DLMI: gradient descent through the LM on relaxed prompts with learned temperatures.

.. math::
    \tau_i = \epsilon + \tau_0 (1 + \tanh \Phi_i), \quad
    p_i = softmax((Z_i + g_i) / \tau_i), \quad
    h_i = p_i E, \quad
    \min_{Z, \Phi} E_g [ d(f(h_1 .. h_N), y) ]

Algorithm 1 of "Language Model Inversion through End-to-End Differentiation" (arXiv 2602.11044).
Z and Phi are learned jointly, one temperature per position. The target is teacher-forced; with
`teacher_forcing: false` ("DLMI-TF", minus TF, in the paper) the LM runs freely and the gradient
reaches the prompt through the KV cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from dlmi.errors import InputError
from dlmi.estimators.sampling import EstimatorName
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.estimators.temperature import temperature_law
from dlmi.methods.base import Relaxation, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, RelaxedNextToken, Steps
from dlmi.tokens.vocabulary import Vocabulary


@dataclass(frozen=True)
class DLMI(Relaxation[None]):
    """Gumbel-Softmax prompts with learnable temperatures.

    Args:
        tau0: Scale of the temperature: tau lies between 0 and 2 tau0.
        temperature: One learned tau per position (`decoupled`), one for all (`shared`), or tau0
            itself (`fixed`).
        phi_init: Start of Phi: `normal` (paper), `uniform` on [0, 1) (the authors' code) or `zero`
            (tau = tau0 exactly).
        num_samples: Gumbel samples per step, S; their losses are averaged.
        estimator: How rows are drawn and differentiated: `gumbel_softmax` (relaxed rows), or
            one-hot rows with the gradient of `straight_through`, `gumbel_rao` or `reinmax`.
        rao_draws: Conditional draws per sample of `gumbel_rao`, K.
        teacher_forcing: Feed the target's own prefix; else run freely ("DLMI-TF" in the paper).
        next_token_tau: In a free run, read relaxed samples of this temperature as next tokens;
            unset: greedy ones.
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
        lr: Adam's learning rate, for Z and Phi alike.
        adam_eps: Adam's epsilon. At tau near 100 the gradients of Z are as small as the default.
    """

    tau0: float = 100.0
    temperature: Literal["decoupled", "shared", "fixed"] = "decoupled"
    phi_init: Literal["normal", "uniform", "zero"] = "normal"
    num_samples: int = 8
    estimator: EstimatorName = "gumbel_softmax"
    rao_draws: int = 10
    teacher_forcing: bool = True
    next_token_tau: float | None = None
    loss: LossName = "cross_entropy"
    lr: float = 0.1
    adam_eps: float = 1e-8

    ranges: ClassVar = {"adam_eps": "[0, inf)"}

    def __post_init__(self) -> None:
        """Raise `InputError` for settings that exclude each other."""
        super().__post_init__()
        if self.estimator == "reinmax" and (self.temperature != "fixed" or self.tau0 < 1):
            raise InputError(
                "Expected `model.method.temperature: fixed` and `model.method.tau0` of at least 1 "
                f"with `model.method.estimator: reinmax`, but got {self.temperature!r} and "
                f"{self.tau0}: it has no gradient for a temperature."
            )
        if self.next_token_tau is not None and self.teacher_forcing:
            raise InputError(
                "Expected `model.method.teacher_forcing: false` with `model.method.next_token_tau`"
                ", but it is true: teacher forcing reads the target, not the next token."
            )

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V), and Phi: (N,) decoupled, () shared, none if fixed."""
        shapes: dict[str, tuple[int, ...]] = {"Z": (length, len(vocabulary))}
        if self.temperature != "fixed":
            shapes["Phi"] = (length,) if self.temperature == "decoupled" else ()
        return shapes

    def init(self, slot: Slot) -> None:
        """Z from N(0, 1), Phi as `phi_init` says."""
        super().init(slot)
        if self.temperature == "fixed":
            return
        Phi = slot.params["Phi"].zero_()
        if self.phi_init == "normal":
            slot.draw_normal_("Phi")
        elif self.phi_init == "uniform":
            Phi.copy_(torch.rand(Phi.shape, generator=slot.rng, dtype=Phi.dtype))

    def soft_prompt(self, slot: Slot, state: None) -> SoftPrompt:
        """S samples of the rows of Z."""
        Z = slot.params["Z"]
        if self.temperature == "fixed":
            tau = Z.new_full((slot.length,), self.tau0)
        else:
            tau = temperature_law(slot.params["Phi"], self.tau0).expand(slot.length)
        return SoftPrompt(Z, tau, self.estimator, self.num_samples, slot.seed(), self.rao_draws)

    def step(self, slot: Slot, state: None) -> Steps[tuple[Step, None]]:
        """The loss of the target, averaged over S samples."""
        next_token = None
        if self.next_token_tau is not None:
            next_token = RelaxedNextToken(self.next_token_tau, slot.seed("next token"))
        prompt = self.soft_prompt(slot, state)
        scores = yield Pass(prompt, slot.examples, self.loss, self.teacher_forcing, next_token)
        return Step(scores.losses.mean(), scores.output_ids[0]), None
