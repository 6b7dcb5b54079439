"""All estimators and the truth at one state of a run.

Axes: K draws, N positions, V tokens, P chosen logits.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmi.errors import InputError, check_at_least_one
from dlmi.gradients.draws import DrawSlot, draw_gradients, hard_loss
from dlmi.gradients.estimators import Estimator, is_sparse, label, state_along
from dlmi.gradients.statistics import expected_events, inner_products, measure, squared_norm
from dlmi.gradients.truth import (
    AS_IN_CODE_DRAWS,
    HardLoss,
    Truth,
    TruthName,
    as_in_code_reference,
    conditional_truth,
    exact_truth,
    rloo_truth,
    sample_prompts,
)
from dlmi.methods.slot import Slot
from dlmi.scoring.passes import Reader

_PILOT_BATCHES = 4


@dataclass(frozen=True)
class StudySettings:
    """How much is drawn; see `GradientStudy`."""

    draws: int = 5
    truth: TruthName = "rloo"
    truth_samples: int = 4096
    truth_blocks: int = 8
    coordinates: int = 64

    def __post_init__(self) -> None:
        for name, count in (("draws", self.draws), ("truth_blocks", self.truth_blocks)):
            if count < 3:
                raise InputError(
                    f"Expected `study.{name}` to be at least 3, but got {count}: an interval "
                    "leaves one out and needs two more."
                )
        if self.truth_samples < 2 * self.truth_blocks:
            raise InputError(
                "Expected `study.truth_samples` to be at least twice `study.truth_blocks` "
                f"({2 * self.truth_blocks}), but got {self.truth_samples}."
            )
        check_at_least_one("study", coordinates=self.coordinates)


def measure_state(
    run: Estimator,
    slot: Slot,
    reader: Reader,
    estimators: Sequence[Estimator],
    settings: StudySettings,
    with_truth: bool = True,
) -> Iterator[dict[str, Any]]:
    """Measure estimators with the run's loss, decode and samples at the values of its slot.

    Yields the fields `estimator`, `tau`, `truth` and the statistics of a `GradientRow`.
    """
    logits, samples = slot.params["Z"].detach(), run.num_samples
    loss = hard_loss(run, slot, reader)

    @functools.cache
    def pilot_loss() -> Tensor:
        seed = slot.seed("gradients/average")
        return loss(sample_prompts(logits, _PILOT_BATCHES * samples, seed)).mean()

    states = [state_along(run, slot.state, method, pilot_loss) for method in estimators]
    pairs = list(zip(estimators, states, strict=True))
    truth, description = None, None
    if with_truth:
        pilots = (draw_gradients(*pair, slot, ["pilot"], reader)[0] for pair in pairs)
        truth = _find_truth(loss, slot, settings, samples, pilots)
        description = _describe(truth)
    events = expected_events(logits, settings.draws, samples, truth)
    for method, state in pairs:
        gradients = draw_gradients(method, state, slot, range(settings.draws), reader)
        tau = method.diagnostics(DrawSlot.of(slot, method), state).get("tau")
        yield {
            "estimator": label(method),
            "tau": None if tau is None else float(tau.mean()),
            "truth": description,
            **measure(gradients, truth, events if is_sparse(method) else (math.inf, math.inf)),
        }


def _find_truth(
    loss: HardLoss, slot: Slot, settings: StudySettings, samples: int, pilots: Iterator[Tensor]
) -> Truth:
    logits, count = slot.params["Z"].detach(), settings.truth_samples
    if settings.truth == "exact":
        return exact_truth(loss, logits)
    if settings.truth == "conditional":
        seeds = [slot.seed(f"gradients/{purpose}") for purpose in ("coordinates", "truth")]
        chosen = choose_coordinates(logits, pilots, settings.coordinates, seeds[0])
        return conditional_truth(loss, logits, chosen, count, settings.truth_blocks, seeds[1])
    blocks = settings.truth_blocks if settings.truth == "rloo" else AS_IN_CODE_DRAWS
    seeds = [slot.seed(f"gradients/truth/{block}") for block in range(blocks)]
    if settings.truth == "rloo":
        return rloo_truth(loss, logits, count, seeds)
    return as_in_code_reference(loss, logits, samples, seeds)


def choose_coordinates(logits: Tensor, pilots: Iterator[Tensor], count: int, seed: int) -> Tensor:
    """Logits to measure: half where pilot draws are largest, half from softmax(Z), (P,) sorted.

    There is one pilot of each estimator. None may be among the draws that are measured: logits
    chosen for their noise would show that noise as bias.
    """
    count = min(count, logits.numel())
    largest = [pilot.abs().topk(count).indices for pilot in pilots]
    # By rank, so that each estimator gets its share.
    ranked = torch.stack(largest, dim=1).flatten().tolist()
    drawn = sample_prompts(logits, count, seed)  # (P, N)
    positions = torch.arange(len(logits), device=drawn.device)
    random = (positions * logits.shape[1] + drawn).flatten().tolist()
    first = list(dict.fromkeys(ranked))[: count - count // 2]
    chosen = list(dict.fromkeys([*first, *random, *ranked]))[:count]
    return torch.tensor(sorted(chosen), device=logits.device)


def _describe(truth: Truth) -> dict[str, Any]:
    blocks = range(len(truth.blocks))
    square = squared_norm(inner_products(truth.blocks, truth.blocks), list(blocks))
    return {
        "kind": truth.kind,
        "samples": truth.samples,
        "blocks": len(blocks),
        "coordinates": None if truth.coordinates is None else len(truth.coordinates),
        "norm": math.sqrt(square) if square > 0 else None,
    }
