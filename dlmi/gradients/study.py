"""All estimators at one state of a run: Z, its temperatures, and the truth beside them.

Nothing here draws from a global generator or from a slot's: all noise comes from seeds that the
caller names, one for each purpose, so that a study repeats and disturbs nothing.

Axes: K draws, N positions, V tokens, P chosen logits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmi.errors import InputError, check_at_least_one
from dlmi.gradients.coverage import Coverage
from dlmi.gradients.measured import MeasuredEstimator, draw_gradient
from dlmi.gradients.objective import Objective, sample_prompts
from dlmi.gradients.statistics import inner_products, measure, squared_norm
from dlmi.gradients.truth import (
    AS_IN_CODE_DRAWS,
    Truth,
    TruthName,
    as_in_code_reference,
    conditional_truth,
    exact_truth,
    rloo_truth,
)

SeedFor = Callable[[str], int]

_PILOT_BATCHES = 4


@dataclass(frozen=True)
class StudySettings:
    """How much is drawn.

    Attributes:
        draws: Gradients of each estimator, K.
        truth: How the true gradient is found.
        truth_samples: Prompts that it takes.
        truth_blocks: Independent parts that they are split into.
        coordinates: Logits of a `conditional` truth.
    """

    draws: int = 5
    truth: TruthName = "rloo"
    truth_samples: int = 4096
    truth_blocks: int = 8
    coordinates: int = 64

    def __post_init__(self) -> None:
        if self.draws < 3:
            raise InputError(
                f"Expected `study.draws` to be at least 3, but got {self.draws}: an interval "
                "leaves one out and needs two more."
            )
        if self.truth_blocks < 3:
            raise InputError(
                f"Expected `study.truth_blocks` to be at least 3, but got {self.truth_blocks}."
            )
        if self.truth_samples < 2 * self.truth_blocks:
            raise InputError(
                "Expected `study.truth_samples` to be at least twice `study.truth_blocks` "
                f"({2 * self.truth_blocks}), but got {self.truth_samples}."
            )
        check_at_least_one("study", coordinates=self.coordinates)


@dataclass(frozen=True)
class State:
    """Where on a run it is measured.

    Attributes:
        logits: Z, (N, V).
        phi: Temperature parameters, (N,); 0 where the run learns none.
        average: The moving average of the run's losses, if it keeps one, ().
    """

    logits: Tensor
    phi: Tensor
    average: Tensor | None = None


@dataclass(frozen=True)
class Measurement:
    """An estimator at a state.

    Attributes:
        estimator: Which.
        tau: Mean of its temperatures; None for the score function.
        truth: What it was compared with, as `GradientRow` has it.
        statistics: `Statistic`s by name.
    """

    estimator: MeasuredEstimator
    tau: float | None
    truth: dict[str, Any] | None
    statistics: dict[str, Any]


def measure_state(
    objective: Objective,
    state: State,
    estimators: Sequence[MeasuredEstimator],
    settings: StudySettings,
    num_samples: int,
    seed_for: SeedFor,
    with_truth: bool = True,
) -> Iterator[Measurement]:
    """Measure one estimator after the other.

    Args:
        objective: What is differentiated.
        state: Where.
        estimators: Which.
        settings: How much is drawn.
        num_samples: Samples of one draw, S.
        seed_for: Gives a seed of its own to each purpose.
        with_truth: Whether bias is measured, too.
    """
    average = state.average
    if average is None:
        # What an average over earlier steps would be, from prompts that no draw uses. Its noise
        # adds a few per cent to the variance, and no bias.
        pilot = sample_prompts(state.logits, _PILOT_BATCHES * num_samples, seed_for("average"))
        average = objective.hard_losses(pilot).mean()

    def draw(estimator: MeasuredEstimator, name: object) -> Tensor:
        tau, seed = estimator.tau(state.phi), seed_for(f"{estimator.label}/{name}")
        gradient = draw_gradient(
            estimator, objective, state.logits, tau, num_samples, seed, average
        )
        return gradient.flatten()

    truth, description = None, None
    if with_truth:
        pilots = (draw(estimator, "pilot") for estimator in estimators)
        truth = _find_truth(objective, state.logits, settings, num_samples, seed_for, pilots)
        description = _describe(truth)
    coverage = Coverage.of(state.logits, settings.draws, num_samples, truth)
    for estimator in estimators:
        gradients = torch.stack([draw(estimator, index) for index in range(settings.draws)])
        yield Measurement(
            estimator,
            None if estimator.is_score_function else float(estimator.tau(state.phi).mean()),
            description,
            measure(gradients, truth, coverage if estimator.is_sparse else None),
        )


def _find_truth(
    objective: Objective,
    logits: Tensor,
    settings: StudySettings,
    num_samples: int,
    seed_for: SeedFor,
    pilots: Iterator[Tensor],
) -> Truth:
    if settings.truth == "exact":
        return exact_truth(objective, logits)
    if settings.truth == "rloo":
        seeds = [seed_for(f"truth/{block}") for block in range(settings.truth_blocks)]
        return rloo_truth(objective, logits, settings.truth_samples, settings.truth_blocks, seeds)
    if settings.truth == "as_in_code":
        seeds = [seed_for(f"truth/{call}") for call in range(AS_IN_CODE_DRAWS)]
        return as_in_code_reference(objective, logits, num_samples, seeds)
    return conditional_truth(
        objective,
        logits,
        choose_coordinates(logits, pilots, settings.coordinates, seed_for("coordinates")),
        settings.truth_samples,
        settings.truth_blocks,
        seed_for("truth"),
    )


def choose_coordinates(logits: Tensor, pilots: Iterator[Tensor], count: int, seed: int) -> Tensor:
    """Logits worth knowing: half where pilot draws are largest, half at random, (P,) sorted.

    The pilots must not be among the draws that are measured: logits chosen for their noise would
    show that noise as bias. The random half is drawn from softmax(Z), where the gradient lies.

    Args:
        logits: (N, V).
        pilots: A gradient of each estimator, flattened.
        count: P, or N x V if that is less.
        seed: Of the random half.
    """
    count = min(count, logits.numel())
    largest = [pilot.abs().topk(count).indices for pilot in pilots]
    # By rank, so that each estimator gets its share.
    ranked = torch.stack(largest, dim=1).flatten().tolist()
    drawn = sample_prompts(logits, count, seed)  # (P, N)
    positions = torch.arange(len(logits), device=drawn.device)
    random = (positions * logits.shape[1] + drawn).flatten().tolist()
    chosen = dict.fromkeys(list(dict.fromkeys(ranked))[: count - count // 2])
    for coordinate in [*random, *ranked]:
        if len(chosen) == count:
            break
        chosen[coordinate] = None
    return torch.tensor(sorted(chosen), device=logits.device)


def _describe(truth: Truth) -> dict[str, Any]:
    blocks = list(range(len(truth.blocks)))
    square = squared_norm(inner_products(truth.blocks, truth.blocks), blocks)
    return {
        "kind": truth.kind,
        "samples": truth.samples,
        "blocks": len(blocks),
        "coordinates": None if truth.coordinates is None else len(truth.coordinates),
        "norm": math.sqrt(square) if square > 0 else None,
    }
