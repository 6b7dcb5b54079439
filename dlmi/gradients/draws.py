"""Draws at a state of a run: the gradient of Z that one step of a method would use.

All noise comes from seeds of its own, never from the run's generators, so that a study can be
repeated and does not change the run. Axes: K draws, N positions, V tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlmi.gradients.estimators import Estimator, label
from dlmi.gradients.truth import HardLoss
from dlmi.methods.slot import Slot
from dlmi.scoring.passes import Account, Pass, Reader, advance

_TOKENS_AT_ONCE = 2**13  # of hard prompts in one pass


@dataclass
class DrawSlot(Slot):
    """A slot for one draw: the target and the values of another slot, with its own noise."""

    purpose: str = ""  # of its seeds

    def seed(self, purpose: str = "") -> int:
        """A seed of its own for each purpose within the draw."""
        return super().seed("/".join(part for part in (self.purpose, purpose) if part))

    @classmethod
    def of(cls, slot: Slot, method: Estimator, purpose: str = "") -> "DrawSlot":
        """A copy of a slot's state with the tensors of a method; a missing Phi is 0."""
        params = {}
        for name, shape in method.shapes(slot.length, slot.tokens.vocabulary).items():
            value = slot.params.get(name, slot.params["Z"].new_zeros(())).detach()
            value = value.expand(shape) if shape else value.mean()
            params[name] = nn.Parameter(value, requires_grad=name == "Z")
        rng = torch.Generator()
        copy = cls(slot.target, slot.target.examples, slot.tokens, params, slot.length, rng)
        copy.step, copy.progress = slot.step, slot.progress
        copy.key, copy.purpose = slot.key, purpose
        copy.rng.manual_seed(copy.seed("rng"))
        return copy


@torch.enable_grad()
def draw_gradients(
    method: Estimator, state: Any, slot: Slot, names: Iterable[object], reader: Reader
) -> Tensor:
    """One draw per name at the values of a slot, in shared passes: (K, N V). Not charged."""
    purposes = [f"gradients/{label(method)}/{name}" for name in names]
    slots = [DrawSlot.of(slot, method, purpose) for purpose in purposes]
    steps = [method.step(own, state) for own in slots]
    outcomes = advance(steps, reader, [Account() for _ in slots])
    losses = [outcome.value[0].loss for outcome in outcomes if outcome.value is not None]
    gradients = torch.autograd.grad(losses, [own.params["Z"] for own in slots])
    return torch.stack([gradient.flatten() for gradient in gradients])


def hard_loss(run: Estimator, slot: Slot, reader: Reader) -> HardLoss:
    """The loss of discrete prompts as a run computes it."""

    def losses(columns: Tensor) -> Tensor:
        parts = torch.split(columns, max(1, _TOKENS_AT_ONCE // slot.length))
        passes = (
            Pass(slot.tokens.ids(part), slot.target.examples, run.loss, run.teacher_forcing)
            for part in parts
        )
        return torch.cat([reader([asked])[0].losses for asked in passes]).to(slot.params["Z"])

    return losses
