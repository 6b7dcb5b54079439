r"""SODA: Sparse One-hot Discrete Adam.

.. math::
    p_i = softmax(z_i / 0.05), \quad h_i = p_i E, \quad
    \min_z \frac{1}{M} \sum_j ( \max_v \log q_j(v) - \log q_j(y_j) )

Skapars et al. 2025 (arXiv 2507.01693), for text targets, teacher-forced. Without noise: it is
deterministic until its first restart. Sparsity comes from the low temperature and from the decay of
z. Adam has no bias correction, so z gets a kick whenever its moments are dropped. The discrete
prompt is checked in every step, which costs one more forward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.methods.base import Relaxation, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps


class DecayingAdam(Optimizer):
    """Adam without bias correction that decays the parameters and drops its moments.

    Its options are `lr`, `betas`, `eps`, `decay` (every parameter is multiplied by it after each
    step) and `reset_every` (steps after which the moments are dropped).
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state or state["age"] == group["reset_every"]:
            state["age"] = 0
            state["first"] = torch.zeros_like(parameter)
            state["second"] = torch.zeros_like(parameter)
        state["age"] += 1
        first = state["first"].lerp_(gradient, 1 - beta1)
        second = state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"])
        parameter.mul_(group["decay"])


@dataclass(frozen=True)
class SODA(Relaxation[None]):
    """Noise-free relaxed prompts at a low temperature, and an Adam that drops its moments.

    Args:
        tau: Temperature of the softmax.
        loss: `margin` (0 at the argmax), `cross_entropy`, `hinge` or `mellowmax` (soft maximum).
        lr: Learning rate.
        betas: Decay of Adam's moments.
        adam_eps: Adam's epsilon.
        decay: Z is multiplied by this after each step.
        reset_every: Steps after which Adam's moments are dropped.
        reinit_every: Steps after which Z starts anew from N(0, 0.1^2).
    """

    tau: float = 0.05
    loss: LossName = "margin"
    lr: float = 0.03
    betas: tuple[float, float] = (0.9, 0.995)
    adam_eps: float = 1e-8
    decay: float = 0.98
    reset_every: int = 50
    reinit_every: int = 1500

    ranges: ClassVar = {"betas": "[0, 1)", "adam_eps": "[0, inf)", "decay": "(0, 1]"}

    def init(self, slot: Slot) -> None:
        """Zeros."""
        slot.tokens.bar_(slot.params["Z"].zero_())

    def step(self, slot: Slot, state: None) -> Steps[tuple[Step, None]]:
        """The loss of the relaxed prompt; the discrete one is checked as well."""
        if slot.step and slot.step % self.reinit_every == 0:
            with torch.no_grad():
                slot.tokens.bar_(slot.draw_normal_("Z", std=0.1))
            slot.reset_moments()
        relaxed = yield Pass(self.soft_prompt(slot, state), slot.examples, self.loss)
        prompt_ids = self.prompt_ids(slot, state)
        discrete = yield Pass(prompt_ids[None], slot.examples, self.loss)
        found_ids = prompt_ids if slot.is_wanted(discrete.output_ids[0]) else None
        return Step(relaxed.losses[0], discrete.output_ids[0], found_ids=found_ids), None

    def soft_prompt(self, slot: Slot, state: None) -> SoftPrompt:
        """softmax(Z / tau), without noise."""
        Z = slot.params["Z"]
        return SoftPrompt(Z, Z.new_full((slot.length,), self.tau))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Adam as SODA has it."""
        options = {"decay": self.decay, "reset_every": self.reset_every, "eps": self.adam_eps}
        return DecayingAdam(parameters, lr=self.lr, betas=self.betas, **options)
