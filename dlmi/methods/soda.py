r"""SODA: Sparse One-hot Discrete Adam.

.. math::
    p_i = softmax(z_i / 0.05), \quad h_i = p_i E, \quad
    \min_z \frac{1}{M} \sum_j ( \max_v \log q_j(v) - \log q_j(y_j) )

Skapars et al. 2025 (arXiv 2507.01693), for text targets. No noise and no samples: until the first
restart it is deterministic. Sparsity comes from the low temperature and from the decay of z, and
Adam without bias correction, its moments dropped every 50 steps, kicks z out of where it is stuck.
The target is teacher-forced. Unlike DLMI it learns no temperature and has a margin loss; the
discrete prompt is checked at every step, which costs one more forward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.errors import InputError, check_at_least_one, check_between, check_positive
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.methods.base import Relaxation, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps


class DecayingAdam(Optimizer):
    """Adam without bias correction that decays the parameters and forgets its moments.

    Args:
        params: As for any optimiser.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        decay: Every parameter is multiplied by this after each step.
        reset_every: Steps after which the moments are dropped.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        reset_every: int,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "decay": decay, "reset_every": reset_every}
        super().__init__(params, options)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state or state["age"] == group["reset_every"]:
            state["age"] = 0
            state["first"] = torch.zeros_like(parameter)
            state["second"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        beta1, beta2 = group["betas"]
        state["age"] += 1
        first = state["first"].lerp_(gradient, 1 - beta1)
        second = state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"])
        parameter.mul_(group["decay"])


@dataclass(frozen=True)
class SODA(Relaxation[None]):
    """Noise-free relaxed prompts at a low temperature with a decaying, forgetful Adam.

    Args:
        tau: Temperature of the softmax.
        loss: `margin` (SODA's own), `cross_entropy`, `hinge` or `mellowmax`.
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

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        check_positive("model.method", tau=self.tau, lr=self.lr, decay=self.decay)
        check_at_least_one(
            "model.method", reset_every=self.reset_every, reinit_every=self.reinit_every
        )
        check_between("model.method", 0, 1, decay=self.decay)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(
                f"Expected `model.method.betas` to be at least 0 and below 1, but got {self.betas}."
            )

    def init(self, slot: Slot) -> None:
        """Zeros."""
        slot.tokens.bar_(slot.params["Z"].zero_())

    def step(self, slot: Slot, state: None) -> Steps[tuple[Step, None]]:
        """The margin of the relaxed prompt; the discrete one is checked beside it."""
        if slot.step and slot.step % self.reinit_every == 0:
            self._restart(slot)
        relaxed = yield Pass(self.soft_prompt(slot, state), slot.examples, self.loss)
        prompt_ids = self.prompt_ids(slot, state)
        check = yield Pass(prompt_ids[None], slot.examples, self.loss)
        output_ids = check.output_ids[0]
        found_ids = prompt_ids if slot.is_wanted(output_ids) else None
        return Step(relaxed.losses[0], output_ids, found_ids=found_ids), None

    @torch.no_grad()
    def _restart(self, slot: Slot) -> None:
        slot.tokens.bar_(slot.draw_normal_("Z", std=0.1))
        slot.forget_moments()

    def soft_prompt(self, slot: Slot, state: None) -> SoftPrompt:
        """softmax(Z / tau), without noise."""
        logits = slot.params["Z"]
        return SoftPrompt(logits, logits.new_full((slot.length,), self.tau))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Adam as SODA has it."""
        return DecayingAdam(
            parameters, self.lr, self.betas, self.adam_eps, self.decay, self.reset_every
        )
