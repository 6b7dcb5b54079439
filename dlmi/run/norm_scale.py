"""`norm_gradient_scale: auto`: the factor on gradients at norm layers that suits an LM.

A factor that helps one LM ruins the search on another. So a few are tried, once for each LM: a
short run of ADC on generated targets with each, from the same starts.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.measured import announce, read_measured, write_measured
from dlmi.methods.adc import ADC, ADCState
from dlmi.methods.slot import Slot
from dlmi.scoring.engine import Engine
from dlmi.scoring.passes import advance
from dlmi.targets.by_rank import generate_targets
from dlmi.targets.seeds import hash_seed
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

SCALES = (1.0, 0.85, 0.7, 0.5)
_RANKS = (1, 4, 10)  # of the tokens of a target, for each target
_TARGET_LENGTH, _PROMPT_LENGTH = 8, 16
_STEPS = 90  # of each factor: after 30, one that leads nowhere still looks like the others
_ERRORS = 2.0  # a gain on 1 by so many standard errors is no noise


def choose_scale(lm: FrozenLM) -> float:
    """The factor that ADC gets furthest with on this LM; 1 unless another is clearly better."""
    key = f"norm_gradient_scale {lm.fingerprint()}"
    known = read_measured(key, "scale", SCALES)
    if known is None:
        announce(f"Trying `norm_gradient_scale` {', '.join(map(str, SCALES))} on this LM, once.")
        targets = generate_targets(lm, _RANKS, 1, _TARGET_LENGTH, exclude_special=True)
        losses = {scale: best_losses(lm, targets, scale) for scale in SCALES}
        known = {"scale": best_scale(losses), "losses": losses}
        write_measured(key, known)
        means = ", ".join(f"{statistics.mean(own):.2f} with {s}" for s, own in losses.items())
        announce(
            f"Gradients at the LM's norm layers are scaled by {known['scale']}: a short ADC comes "
            f"to a mean loss of {means}."
        )
    return float(known["scale"])


def with_scale(settings: dict[str, Any], scale: float | None) -> dict[str, Any]:
    """Settings with a number in place of `norm_gradient_scale: auto`, at any depth.

    >>> with_scale({"first": {"norm_gradient_scale": "auto"}, "pass_dtype": "auto"}, 0.7)
    {'first': {'norm_gradient_scale': 0.7}, 'pass_dtype': 'auto'}
    """
    made: dict[str, Any] = {}
    for name, value in settings.items():
        is_auto = name == "norm_gradient_scale" and value == "auto"
        nested = with_scale(value, scale) if isinstance(value, dict) else value
        made[name] = scale if is_auto else nested
    return made


def best_scale(losses: dict[float, list[float]]) -> float:
    """The factor of lowest mean loss among 1 and those that are better by more than the noise.

    >>> best_scale({1.0: [4.0, 5.0, 6.0], 0.85: [3.5, 4.5, 5.4], 0.5: [7.0, 6.0, 0.0]})
    0.85
    """
    clear = [1.0]
    for scale, own in losses.items():
        gains = [plain - loss for plain, loss in zip(losses[1.0], own, strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        if statistics.mean(gains) > _ERRORS * error:
            clear.append(scale)
    return min(clear, key=lambda scale: statistics.mean(losses[scale]))


def best_losses(lm: FrozenLM, targets: Sequence[Target], scale: float) -> list[float]:
    """The lowest cross-entropy of a discrete prompt that a short ADC finds for each target."""
    method = ADC(restarts=1, norm_gradient_scale=scale)
    vocabulary = Vocabulary(lm, ("no_special",))
    engine = Engine(vocabulary, slots=len(targets))
    slots = [_slot(method, vocabulary, target) for target in targets]
    accounts = [slot.account(math.inf) for slot in slots]
    with torch.no_grad():
        states: list[ADCState] = [method.init(slot) for slot in slots]
    optimizer = method.optimizer([slot.params["Z"] for slot in slots])
    for _ in range(_STEPS):
        asked = [method.step(slot, state) for slot, state in zip(slots, states, strict=True)]
        steps = [outcome.value for outcome in advance(asked, engine, accounts)]
        made = [step for step in steps if step is not None]
        optimizer.zero_grad()
        torch.autograd.backward([step.loss for step, _ in made])
        optimizer.step()
        states = [state for _, state in made]
    return [state.best_loss for state in states]


def _slot(method: ADC, vocabulary: Vocabulary, target: Target) -> Slot:
    shape = method.shapes(_PROMPT_LENGTH, vocabulary)["Z"]
    dtype = torch.promote_types(vocabulary.lm.dtype, torch.float32)
    rows = nn.Parameter(torch.zeros(shape, dtype=dtype, device=vocabulary.lm.device))
    return Slot(
        target=target,
        examples=target.examples,
        tokens=vocabulary.for_target(target, 0),
        params={"Z": rows},
        length=_PROMPT_LENGTH,
        rng=torch.Generator().manual_seed(hash_seed(target.id)),
    )
