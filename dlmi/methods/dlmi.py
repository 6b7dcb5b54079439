r"""DLMI: gradient descent through the LM on relaxed prompts with learned temperatures.

.. math::
    \tau_i = \epsilon + \tau_0 (1 + \tanh \Phi_i), \quad
    p_i = softmax((Z_i + g_i) / \tau_i), \quad
    h_i = p_i E, \quad
    \min_{Z, \Phi} E_g [ d(f(h_1 .. h_N), y) ]

Algorithm 1 of "Language Model Inversion through End-to-End Differentiation" (arXiv 2602.11044).
Z and Phi are learned jointly, one temperature per position. The target is teacher-forced; with
`teacher_forcing: false` ("DLMI-TF", minus TF, in the paper) the LM runs freely on its own greedy
tokens and the gradient reaches the prompt through the KV cache. With a fixed temperature and no
teacher forcing this is the paper's GBDA baseline.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.inverter import Inverter, StepLosses
from dlmi.losses import cross_entropy
from dlmi.relaxation import (
    gumbel_noise,
    gumbel_softmax,
    row_entropy,
    straight_through,
    temperature_law,
)
from dlmi.slots import Slot


class DLMI(Inverter):
    """Gumbel-Softmax prompts with learnable temperatures.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        tau0: Scale of the temperature: tau lies between 0 and 2 tau0.
        temperature: One learned tau per position (`decoupled`), one for all (`shared`), or tau0
            itself (`fixed`).
        phi_init: Start of Phi: `normal` (paper, the default), `uniform` on [0, 1) (the authors'
            code) or `zero` (tau = tau0 exactly). Not for a fixed temperature.
        num_samples: Gumbel samples per step, S; their losses are averaged.
        teacher_forcing: Feed the target's own prefix; else run freely on greedy tokens.
        estimator: Feed the relaxed rows (`gumbel_softmax`), or their one-hot argmax with the
            relaxed gradient (`straight_through`).
        lr: Adam's learning rate, for Z and Phi alike.
        adam_eps: Adam's epsilon. At tau near 100 the gradients of Z are as small as the default.
        eval_every: Steps between two greedy decodes of the discrete prompt.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        seed: With the target's id it fixes the noise. On the command line: `seed_everything`.
    """

    Phi: nn.ParameterList

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 2048,
        tau0: float = 100.0,
        temperature: Literal["decoupled", "shared", "fixed"] = "decoupled",
        phi_init: Literal["normal", "uniform", "zero"] | None = None,
        num_samples: int = 8,
        teacher_forcing: bool = True,
        estimator: Literal["gumbel_softmax", "straight_through"] = "gumbel_softmax",
        lr: float = 0.1,
        adam_eps: float = 1e-8,
        eval_every: int = 16,
        prompt_bos: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(prompt_length, steps, eval_every, prompt_bos, seed)
        check_positive("model", tau0=tau0, lr=lr)
        check_at_least_one("model", num_samples=num_samples)
        if temperature == "fixed" and phi_init is not None:
            raise InputError(
                f"Expected `model.phi_init` to be unset with `model.temperature: fixed`, but got "
                f"{phi_init!r}: a fixed temperature has no Phi."
            )
        self.tau0 = tau0
        self.temperature = temperature
        self.phi_init = phi_init or "normal"
        self.num_samples = num_samples
        self.teacher_forcing = teacher_forcing
        self.estimator = estimator
        self.lr = lr
        self.adam_eps = adam_eps

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V), and Phi: (N,) decoupled, () shared, none if fixed."""
        logits = {"Z": (self.prompt_length, len(self.lm.prompt_token_ids))}
        if self.temperature == "fixed":
            return logits
        return {**logits, "Phi": (self.prompt_length,) if self.temperature == "decoupled" else ()}

    def initialise(self, slot: Slot) -> None:
        """Z from N(0, 1), Phi as `phi_init` says."""
        self.Z[slot.index].normal_(generator=slot.generator)
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

    def soft_prompt_embeds(self, slot: Slot) -> Tensor:
        """S relaxed prompts of one slot as embeddings, (S, N, d), in float32 or better."""
        logits = self.Z[slot.index]
        noise = gumbel_noise((self.num_samples, *logits.shape), slot.generator, logits.dtype)
        # Autocast is for the LM: a bfloat16 product here would round the gradient of Z away.
        with torch.autocast(logits.device.type, enabled=False):
            rows = gumbel_softmax(logits, self.tau(slot), noise)  # (S, N, V)
            if self.estimator == "straight_through":
                rows = straight_through(rows)
            embeds: Tensor = rows @ self.lm.prompt_embedding_matrix.to(logits.dtype)
            return embeds

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """Cross-entropy of the target, averaged over the S samples of each slot."""
        embeds = torch.cat([self.soft_prompt_embeds(slot) for slot in slots])  # (B*S, N, d)
        embeds = self.prepend_bos(embeds)
        target_ids, mask = (
            t.repeat_interleave(self.num_samples, dim=0) for t in self.padded_targets(slots)
        )  # (B*S, M)
        if self.teacher_forcing:
            logits = self.lm.target_logits(embeds, target_ids)
        else:
            logits, _ = self.lm.free_run(embeds, target_ids.shape[1])
        losses = cross_entropy(logits, target_ids, mask).view(len(slots), self.num_samples)
        first_samples = logits.detach()[:: self.num_samples]  # (B, M, V)
        return StepLosses(losses.mean(dim=1), first_samples.argmax(dim=-1))

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The largest logit of each position, (B, N)."""
        return self.argmax_prompt_ids(slots)

    @torch.no_grad()
    def diagnostics(self, slot: Slot) -> dict[str, Tensor]:
        """Temperature and entropy of each position's noise-free row."""
        tau = self.tau(slot)
        return {"tau": tau, "entropy": row_entropy(self.Z[slot.index], tau)}

    def configure_optimizers(self) -> Optimizer:
        """Adam on Z and Phi jointly."""
        return Adam(self.parameters(), lr=self.lr, eps=self.adam_eps)
