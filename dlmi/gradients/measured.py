"""The estimators that are measured, by name, and one draw of each.

A draw is the gradient that one training step would use: the mean over S samples, with respect to Z.
All arithmetic is that of the methods themselves (`PromptSampler`, `score_function`).

Axes: S samples, N positions, V tokens.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dlmi.estimators import EstimatorName, PromptSampler
from dlmi.gradients.objective import Objective
from dlmi.relaxation import temperature_law
from dlmi.score_function import BaselineName, score_function_gradient
from dlmi.soft_embedding import sample_columns

TemperatureName = Literal["fixed", "shared", "decoupled"]
MeasuredName = Literal[
    "reinforce",
    "rloo",
    "gs_tau1",
    "gs_tau100",
    "gs_shared_tau1",
    "gs_shared_tau100",
    "gs_decoupled_tau1",
    "gs_decoupled_tau100",
    "straight_through",
    "gumbel_rao",
    "reinmax",
]

_SHORT = {
    "ema": "REINFORCE",
    "rloo": "RLOO",
    "as_code": "REINFORCE as in code",
    "none": "REINFORCE without baseline",
    "gumbel_softmax": "GS",
    "straight_through": "ST",
    "gumbel_rao": "Gumbel-Rao",
    "reinmax": "ReinMax",
    "fixed": "tau",
    "shared": "L tau0",
    "decoupled": "D+L tau0",
}


@dataclass(frozen=True)
class MeasuredEstimator:
    """A way to estimate the gradient of Z.

    Attributes:
        kind: A relaxation of `PromptSampler`, or a baseline of the score function.
        temperature: Of a relaxation: fixed, learned for all positions (`shared`, "L" in the
            paper) or learned per position (`decoupled`, "D+L").
        tau0: Its scale; the temperature itself where it is fixed.
        rao_draws: K of `gumbel_rao`.
    """

    kind: EstimatorName | BaselineName
    temperature: TemperatureName = "fixed"
    tau0: float = 1.0
    rao_draws: int = 10

    @property
    def is_score_function(self) -> bool:
        """Whether it needs losses of hard prompts only."""
        return self.kind in get_args(BaselineName)

    @property
    def is_sparse(self) -> bool:
        """Whether a draw shows (almost) only the tokens that it has sampled."""
        return self.is_score_function or self.kind == "reinmax"

    @property
    def label(self) -> str:
        """How rows, tables and figures call it.

        >>> MeasuredEstimator("gumbel_softmax", "decoupled", 100.0).label
        'GS D+L tau0=100'
        """
        if self.is_score_function:
            return _SHORT[self.kind]
        return f"{_SHORT[self.kind]} {_SHORT[self.temperature]}={self.tau0:g}"

    def tau(self, phi: Tensor) -> Tensor:
        """Its temperatures at a state, (N,) to (N,).

        Learned ones follow the state's Phi under their own tau0; a shared one follows the mean.
        """
        if self.temperature == "fixed":
            return torch.full_like(phi, self.tau0)
        shared = phi.mean().expand_as(phi)
        return temperature_law(phi if self.temperature == "decoupled" else shared, self.tau0)


ESTIMATORS: dict[MeasuredName, MeasuredEstimator] = {
    "reinforce": MeasuredEstimator("ema"),
    "rloo": MeasuredEstimator("rloo"),
    "gs_tau1": MeasuredEstimator("gumbel_softmax", "fixed", 1.0),
    "gs_tau100": MeasuredEstimator("gumbel_softmax", "fixed", 100.0),
    "gs_shared_tau1": MeasuredEstimator("gumbel_softmax", "shared", 1.0),
    "gs_shared_tau100": MeasuredEstimator("gumbel_softmax", "shared", 100.0),
    "gs_decoupled_tau1": MeasuredEstimator("gumbel_softmax", "decoupled", 1.0),
    "gs_decoupled_tau100": MeasuredEstimator("gumbel_softmax", "decoupled", 100.0),
    "straight_through": MeasuredEstimator("straight_through"),
    "gumbel_rao": MeasuredEstimator("gumbel_rao"),
    "reinmax": MeasuredEstimator("reinmax"),
}


def draw_gradient(
    estimator: MeasuredEstimator,
    objective: Objective,
    logits: Tensor,
    tau: Tensor,
    num_samples: int,
    seed: int,
    average: Tensor,
) -> Tensor:
    """One draw.

    Args:
        estimator: Whose.
        objective: What is differentiated.
        logits: Z, (N, V).
        tau: Temperatures of a relaxation, (N,).
        num_samples: S.
        seed: Of the noise.
        average: What the baseline `ema` subtracts, ().

    Returns:
        (N, V).
    """
    if estimator.is_score_function:
        columns = sample_columns(logits, num_samples, seed)
        losses = objective.hard_losses(columns)
        baseline: BaselineName = estimator.kind  # type: ignore[assignment]
        return score_function_gradient(logits, columns, losses, baseline, average)
    relaxation: EstimatorName = estimator.kind  # type: ignore[assignment]
    sampler = PromptSampler(relaxation, num_samples, estimator.rao_draws)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        embeds = sampler([leaf], tau.detach()[None], objective.matrix, [seed])[0]
        [gradient] = torch.autograd.grad(objective.loss(embeds).mean(), leaf)
    return gradient
