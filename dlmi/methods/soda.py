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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.fluency import check_fluency
from dlmi.inverter import Inverter
from dlmi.losses import LossName
from dlmi.passes import StepLosses, target_pass
from dlmi.prompt_forms import Relaxation
from dlmi.relaxation import row_entropy
from dlmi.slots import Slot
from dlmi.soft_embedding import soft_embedding
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens


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


class SODA(Inverter):
    """Noise-free relaxed prompts at a low temperature with a decaying, forgetful Adam.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        tau: Temperature of the softmax.
        loss: `margin` (SODA's own), `cross_entropy` or `hinge`.
        lr: Learning rate.
        betas: Decay of Adam's moments.
        adam_eps: Adam's epsilon.
        decay: z is multiplied by this after each step.
        reset_every: Steps after which Adam's moments are dropped.
        reinit_every: Steps after which z starts anew from N(0, 0.1^2).
        eval_every: Steps between two greedy decodes of the discrete prompt.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        fluency: Weight of a penalty on prompts that the LM finds unlikely; 0 for none.
        norm_gradient_scale: Factor on gradients at the LM's norm layers; 1 leaves them alone.
        refine_after: Share of the budget after which the best discrete prompt is refined by
            swaps (`dlmi.refinement`); 1 for never.
        refine_width: Swaps that a step of the refinement tries.
        seed: With the target's id it fixes the restarts. On the command line: `seed_everything`.
    """

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 2048,
        token_budget: int | None = None,
        tau: float = 0.05,
        loss: LossName = "margin",
        lr: float = 0.03,
        betas: tuple[float, float] = (0.9, 0.995),
        adam_eps: float = 1e-8,
        decay: float = 0.98,
        reset_every: int = 50,
        reinit_every: int = 1500,
        eval_every: int = 16,
        prompt_bos: bool = False,
        allowed_tokens: AllowedTokens = "all",
        forbid_target_tokens: ForbiddenTokens = "none",
        fluency: float = 0.0,
        norm_gradient_scale: float = 1.0,
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
        self.set_norm_gradient_scale(norm_gradient_scale)
        self.set_refinement(refine_after, refine_width)
        self.fluency = check_fluency(fluency, prompt_length)
        check_positive("model", tau=tau, lr=lr, decay=decay)
        check_at_least_one("model", reset_every=reset_every, reinit_every=reinit_every)
        if decay > 1 or not all(0 <= beta < 1 for beta in betas):
            raise InputError(
                "Expected `model.decay` to be at most 1 and `model.betas` to be at least 0 and "
                f"below 1, but got {decay} and {betas}."
            )
        self.tau = tau
        self.loss: LossName = loss
        self.adam_options = {
            "lr": lr,
            "betas": betas,
            "eps": adam_eps,
            "decay": decay,
            "reset_every": reset_every,
        }
        self.reinit_every = reinit_every

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V)."""
        return {"Z": (self.prompt_length, len(self.vocabulary))}

    def initialise(self, slot: Slot) -> None:
        """Zeros."""
        self.vocabulary.bar_(self.Z[slot.index].zero_(), slot.target)

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """The margin of the relaxed prompt; the discrete one is checked beside it."""
        for slot in slots:
            if slot.step and slot.step % self.reinit_every == 0:
                self._restart(slot)
        logits = [self.Z[slot.index] for slot in slots]
        tau = logits[0].new_full((len(slots), self.prompt_length), self.tau)
        embeds = soft_embedding(logits, tau, self.prompt_matrix)  # (B, 1, N, d)
        losses, _ = target_pass(
            self.lm,
            slots,
            embeds,
            self.loss,
            prompt_bos=self.prompt_bos,
            fluency=self.fluency_term,
        )
        return StepLosses(losses[:, 0], self._check(slots))

    @torch.no_grad()
    def _check(self, slots: Sequence[Slot]) -> Tensor:
        """What teacher forcing decodes after the discrete prompts of this step, (B, M)."""
        prompt_ids = self.argmax_prompt_ids(slots)
        embeds = self.lm.embed(prompt_ids)[:, None]
        _, output_ids = target_pass(self.lm, slots, embeds, self.loss, prompt_bos=self.prompt_bos)
        for slot, ids, outputs in zip(slots, prompt_ids, output_ids[:, 0], strict=True):
            wanted_ids = slot.target_at().ids
            slot.is_promising = tuple(outputs[: len(wanted_ids)].tolist()) == wanted_ids
            slot.memory["checked_ids"] = ids
        return output_ids[:, 0]

    @torch.no_grad()
    def _restart(self, slot: Slot) -> None:
        parameter = self.Z[slot.index]
        self.vocabulary.bar_(parameter.normal_(std=0.1, generator=slot.generator), slot.target)
        self.forget_moments(slot)

    def token_passes_per_step(self, target_length: int) -> int:
        """The relaxed prompt forward and backward, the discrete one forward."""
        return 3 * (self.prompt_length + target_length - 1)

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The argmax of z; where the check has just passed, the prompt that passed it, (B, N)."""
        latest = self.argmax_prompt_ids(slots)
        for row, slot in enumerate(slots):
            if slot.is_promising:  # the update after the check may have changed the argmax
                latest[row] = slot.memory["checked_ids"]
        return latest

    @torch.no_grad()
    def diagnostics(self, slot: Slot) -> dict[str, Tensor]:
        """Entropy of each position's row."""
        logits: Tensor = self.Z[slot.index]
        return {"entropy": row_entropy(logits, logits.new_tensor(self.tau))}

    def relaxation(self, slot: Slot) -> Relaxation:
        """softmax(z / tau), without noise."""
        logits: Tensor = self.Z[slot.index]
        return Relaxation(logits, logits.new_full((len(logits),), self.tau))

    def configure_optimizers(self) -> Optimizer:
        """Adam as SODA has it."""
        return DecayingAdam(self.parameters(), **self.adam_options)  # type: ignore[arg-type]
