r"""GBDA: Gumbel-Softmax prompts at a temperature that is not learned.

.. math::
    p_i = softmax((Z_i + g_i) / \tau), \quad h_i = p_i E, \quad \min_Z E_g [ d(f(h_1 .. h_N), y) ]

Guo et al. 2021, "Gradient-based Adversarial Attacks against Text Transformers", as the DLMI paper
adapts it to inversion: Z from N(0, 1), 8 samples, free greedy run, no similarity or fluency terms.
It is DLMI without learned temperatures and without teacher forcing. Two parts of its relatives are
options: `final_samples` draws hard prompts from softmax(Z) at the end and keeps the best (the
original's last step), and `tau_end` anneals the temperature geometrically over the budget.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.estimators import EstimatorName, PromptSampler
from dlmi.fluency import check_fluency
from dlmi.inverter import Inverter
from dlmi.losses import LossName
from dlmi.passes import StepLosses, target_pass
from dlmi.prompt_forms import Relaxation
from dlmi.relaxation import annealed_temperature, row_entropy
from dlmi.slots import Slot
from dlmi.soft_embedding import sample_columns
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens


class GBDA(Inverter):
    """Gumbel-Softmax prompts at a fixed or annealed temperature.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        tau: The temperature, or where it starts.
        tau_end: Where a geometric annealing over the budget ends; unset: it stays.
        final_samples: Hard prompts drawn from softmax(Z) when the budget is spent; the best counts.
        num_samples: Gumbel samples per step, S; their losses are averaged.
        teacher_forcing: Feed the target's own prefix; else run freely on greedy tokens.
        estimator: `gumbel_softmax`, or a one-hot forward pass with another gradient.
        rao_draws: Conditional draws per sample of `gumbel_rao`, K.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax) or `hinge`.
        lr: Adam's learning rate.
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

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 2048,
        token_budget: int | None = None,
        tau: float = 1.0,
        tau_end: float | None = None,
        final_samples: int = 0,
        num_samples: int = 8,
        teacher_forcing: bool = False,
        estimator: EstimatorName = "gumbel_softmax",
        rao_draws: int = 10,
        loss: LossName = "cross_entropy",
        lr: float = 0.1,
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
        check_positive("model", tau=tau, lr=lr, tau_end=tau if tau_end is None else tau_end)
        check_at_least_one("model", num_samples=num_samples, rao_draws=rao_draws)
        if final_samples < 0:
            raise InputError(
                f"Expected `model.final_samples` to be at least 0, but got {final_samples}."
            )
        if estimator == "reinmax" and min(tau, tau if tau_end is None else tau_end) < 1:
            raise InputError(
                "Expected `model.tau` and `model.tau_end` of at least 1 with `model.estimator: "
                f"reinmax`, but got {tau} and {tau_end}."
            )
        self.initial_tau = tau
        self.tau_end = tau if tau_end is None else tau_end
        self.final_samples = final_samples
        self.teacher_forcing = teacher_forcing
        self.sampler = PromptSampler(estimator, num_samples, rao_draws)
        self.loss: LossName = loss
        self.lr = lr

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V)."""
        return {"Z": (self.prompt_length, len(self.vocabulary))}

    def initialise(self, slot: Slot) -> None:
        """Z from N(0, 1)."""
        self.vocabulary.bar_(self.Z[slot.index].normal_(generator=slot.generator), slot.target)

    def tau(self, slot: Slot) -> Tensor:
        """The slot's temperature at this point of its budget, (N,)."""
        progress = self.budget.share_used(slot)
        tau = annealed_temperature(self.initial_tau, self.tau_end, progress)
        logits: Tensor = self.Z[slot.index]
        return logits.new_full((self.prompt_length,), tau)

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
            fluency=self.fluency_term,
        )
        return StepLosses(losses.mean(dim=1), output_ids[:, 0])

    def token_passes_per_step(self, target_length: int) -> int:
        """S relaxed prompts, forward and backward."""
        return 2 * self.sampler.num_samples * (self.prompt_length + target_length - 1)

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The largest logit of each position, (B, N)."""
        return self.argmax_prompt_ids(slots)

    def final_prompt_ids(self, slot: Slot) -> Tensor | None:
        """Hard draws from softmax(Z), (R, N)."""
        if not self.final_samples:
            return None
        seed = slot.noise_seed("final samples")
        columns = sample_columns(self.Z[slot.index], self.final_samples, seed)
        return self.mended(slot, self.vocabulary.ids(columns))

    @torch.no_grad()
    def diagnostics(self, slot: Slot) -> dict[str, Tensor]:
        """Temperature and entropy of each position's noise-free row."""
        tau = self.tau(slot)
        return {"tau": tau, "entropy": row_entropy(self.Z[slot.index], tau)}

    def relaxation(self, slot: Slot) -> Relaxation:
        """Z, its temperature, and the estimator's way to draw from them."""
        return Relaxation(self.Z[slot.index], self.tau(slot), self.sampler.estimator)

    def configure_optimizers(self) -> Optimizer:
        """Adam on Z."""
        return Adam(self.parameters(), lr=self.lr, fused=True)
