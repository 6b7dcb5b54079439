r"""DLMI: gradient descent through the LM on relaxed prompts with learned temperatures.

.. math::
    \tau_i = \epsilon + \tau_0 (1 + \tanh \Phi_i), \quad
    p_i = softmax((Z_i + g_i) / \tau_i), \quad
    h_i = p_i E, \quad
    \min_{Z, \Phi} E_g [ d(f(h_1 .. h_N), y) ]

Algorithm 1 of "Language Model Inversion through End-to-End Differentiation" (arXiv 2602.11044).
Z and Phi are learned jointly, one temperature per position. The target is teacher-forced; with
`teacher_forcing: false` ("DLMI-TF", minus TF, in the paper) the LM runs freely and the gradient
reaches the prompt through the KV cache. GBDA is the same with a fixed temperature and no teacher
forcing; SODA has neither noise nor learned temperatures; REINFORCE has no soft embedding.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.estimators import EstimatorName, PromptSampler, gumbel_softmax
from dlmi.fluency import check_fluency
from dlmi.inverter import Inverter
from dlmi.layouts import Rows
from dlmi.losses import LossName
from dlmi.noise import gumbel_noise
from dlmi.passes import RowNextEmbeds, StepLosses, target_pass
from dlmi.prompt_forms import Relaxation
from dlmi.relaxation import row_entropy, temperature_law
from dlmi.slots import Slot
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens


class DLMI(Inverter):
    """Gumbel-Softmax prompts with learnable temperatures.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        tau0: Scale of the temperature: tau lies between 0 and 2 tau0.
        temperature: One learned tau per position (`decoupled`), one for all (`shared`), or tau0
            itself (`fixed`).
        phi_init: Start of Phi: `normal` (paper, the default), `uniform` on [0, 1) (the authors'
            code) or `zero` (tau = tau0 exactly). Not for a fixed temperature.
        num_samples: Gumbel samples per step, S; their losses are averaged.
        teacher_forcing: Feed the target's own prefix; else run freely.
        next_token: What a free run reads next: its `greedy` token, or a relaxed sample
            (`gumbel_softmax`) through which the gradient passes. Not with teacher forcing.
        next_token_tau: Temperature of that sample.
        estimator: How rows are drawn and differentiated: `gumbel_softmax` (relaxed rows), or
            one-hot rows with the gradient of `straight_through`, `gumbel_rao` or `reinmax`.
        rao_draws: Conditional draws per sample of `gumbel_rao`, K.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax) or `hinge`.
        lr: Adam's learning rate, for Z and Phi alike.
        adam_eps: Adam's epsilon. At tau near 100 the gradients of Z are as small as the default.
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
        seed: With the target's id it fixes the noise. On the command line: `seed_everything`.
    """

    Phi: nn.ParameterList

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 2048,
        token_budget: int | None = None,
        tau0: float = 100.0,
        temperature: Literal["decoupled", "shared", "fixed"] = "decoupled",
        phi_init: Literal["normal", "uniform", "zero"] | None = None,
        num_samples: int = 8,
        teacher_forcing: bool = True,
        next_token: Literal["greedy", "gumbel_softmax"] = "greedy",
        next_token_tau: float = 1.0,
        estimator: EstimatorName = "gumbel_softmax",
        rao_draws: int = 10,
        loss: LossName = "cross_entropy",
        lr: float = 0.1,
        adam_eps: float = 1e-8,
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
        check_positive("model", tau0=tau0, lr=lr, next_token_tau=next_token_tau)
        check_at_least_one("model", num_samples=num_samples, rao_draws=rao_draws)
        if temperature == "fixed" and phi_init is not None:
            raise InputError(
                f"Expected `model.phi_init` to be unset with `model.temperature: fixed`, but got "
                f"{phi_init!r}: a fixed temperature has no Phi."
            )
        if estimator == "reinmax" and (temperature != "fixed" or tau0 < 1):
            raise InputError(
                "Expected `model.temperature: fixed` and `model.tau0` of at least 1 with "
                f"`model.estimator: reinmax`, but got {temperature!r} and {tau0}: it has no "
                "gradient for a temperature."
            )
        if teacher_forcing and next_token != "greedy":
            raise InputError(
                f"Expected `model.teacher_forcing: false` with `model.next_token: {next_token}`, "
                "but it is true: teacher forcing reads the target, not the next token."
            )
        self.tau0 = tau0
        self.temperature = temperature
        self.phi_init = phi_init or "normal"
        self.num_samples = num_samples
        self.teacher_forcing = teacher_forcing
        self.next_token = next_token
        self.next_token_tau = next_token_tau
        self.sampler = PromptSampler(estimator, num_samples, rao_draws)
        self.loss: LossName = loss
        self.lr = lr
        self.adam_eps = adam_eps

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V), and Phi: (N,) decoupled, () shared, none if fixed."""
        logits = {"Z": (self.prompt_length, len(self.vocabulary))}
        if self.temperature == "fixed":
            return logits
        return {**logits, "Phi": (self.prompt_length,) if self.temperature == "decoupled" else ()}

    def initialise(self, slot: Slot) -> None:
        """Z from N(0, 1), Phi as `phi_init` says."""
        self.vocabulary.bar_(self.Z[slot.index].normal_(generator=slot.generator), slot.target)
        if self.temperature == "fixed":
            return
        phi = self.Phi[slot.index]
        if self.phi_init == "normal":
            phi.normal_(generator=slot.generator)
        elif self.phi_init == "uniform":
            phi.uniform_(generator=slot.generator)
        else:
            phi.zero_()

    def tau(self, slot: Slot) -> Tensor:
        """The slot's temperatures, (N,)."""
        if self.temperature == "fixed":
            logits: Tensor = self.Z[slot.index]
            return logits.new_full((self.prompt_length,), self.tau0)
        return temperature_law(self.Phi[slot.index], self.tau0).expand(self.prompt_length)

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """The loss of the target, averaged over the S samples of each slot."""
        embeds = self.sampler(
            [self.Z[slot.index] for slot in slots],
            torch.stack([self.tau(slot) for slot in slots]),
            self.prompt_matrix,
            [slot.noise_seed() for slot in slots],
        )
        losses, output_ids = target_pass(
            self.lm,
            slots,
            embeds,
            self.loss,
            self.teacher_forcing,
            self.prompt_bos,
            self._next_embeds(slots) if self.next_token == "gumbel_softmax" else None,
            self.fluency_term,
        )
        return StepLosses(losses.mean(dim=1), output_ids[:, 0])

    def _next_embeds(self, slots: Sequence[Slot]) -> RowNextEmbeds:
        """Draws the relaxed next token of a free run, (r, 1, V) logits to (r, 1, d)."""
        seeds = [slot.noise_seed("next token") for slot in slots]

        def next_embeds(rows: Rows, logits: Tensor, step: int) -> Tensor:
            shape = (self.num_samples, 1, logits.shape[-1])
            # All slots' noise, then some rows of it: they need not be whole slots.
            noise = [gumbel_noise(seed, shape, logits.device, logits.dtype, step) for seed in seeds]
            tau = logits.new_tensor([self.next_token_tau])
            relaxed = gumbel_softmax(logits, tau, torch.cat(noise)[rows])
            matrix = self.lm.embedding_matrix[: relaxed.shape[-1]]
            embeds: Tensor = relaxed @ matrix.to(relaxed.dtype)
            return embeds

        return next_embeds

    def token_passes_per_step(self, target_length: int) -> int:
        """S relaxed prompts, forward and backward."""
        return 2 * self.num_samples * (self.prompt_length + target_length - 1)

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The largest logit of each position, (B, N)."""
        return self.argmax_prompt_ids(slots)

    @torch.no_grad()
    def diagnostics(self, slot: Slot) -> dict[str, Tensor]:
        """Temperature and entropy of each position's noise-free row."""
        tau = self.tau(slot)
        return {"tau": tau, "entropy": row_entropy(self.Z[slot.index], tau)}

    def relaxation(self, slot: Slot) -> Relaxation:
        """Z, its temperatures, and the estimator's way to draw from them."""
        return Relaxation(self.Z[slot.index], self.tau(slot), self.sampler.estimator)

    def configure_optimizers(self) -> Optimizer:
        """Adam on Z and Phi jointly."""
        return Adam(self.parameters(), lr=self.lr, eps=self.adam_eps, fused=True)
