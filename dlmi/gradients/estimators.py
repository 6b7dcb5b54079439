"""The estimators that are measured, and their draws: the gradient of Z that one step would use.

All noise of draws comes from seeds of their own, never from the run's generators, so that a study
can be repeated and does not change the run. Axes: K draws, N positions, V tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dlmi.errors import InputError
from dlmi.gradients.truth import HardLoss
from dlmi.methods.base import Method
from dlmi.methods.dlmi import DLMI
from dlmi.methods.gbda import GBDA
from dlmi.methods.reinforce import REINFORCE, REINFORCEState
from dlmi.methods.slot import Slot
from dlmi.scoring.passes import Account, Pass, Reader, advance

_TOKENS_AT_ONCE = 2**13  # of hard prompts in one pass

# Methods whose Z are the logits of a distribution from which each step draws S prompts.
Estimator = DLMI | GBDA | REINFORCE

ESTIMATORS: dict[str, Estimator] = {
    "reinforce": REINFORCE(),
    "rloo": REINFORCE(baseline="rloo"),
    "gs_tau1": DLMI(1.0, "fixed"),
    "gs_tau100": DLMI(100.0, "fixed"),
    "gs_shared_tau1": DLMI(1.0, "shared"),
    "gs_shared_tau100": DLMI(100.0, "shared"),
    "gs_decoupled_tau1": DLMI(1.0, "decoupled"),
    "gs_decoupled_tau100": DLMI(100.0, "decoupled"),
    "straight_through": DLMI(1.0, "fixed", estimator="straight_through"),
    "gumbel_rao": DLMI(1.0, "fixed", estimator="gumbel_rao"),
    "reinmax": DLMI(1.0, "fixed", estimator="reinmax"),
}

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


def label(method: Estimator) -> str:
    """The name of an estimator in rows, tables and figures.

    >>> label(DLMI(100.0)), label(GBDA(tau=2.0)), label(REINFORCE())
    ('GS D+L tau0=100', 'GS tau=2', 'REINFORCE')
    """
    if isinstance(method, REINFORCE):
        return _SHORT[method.baseline]
    kind = _SHORT.get(method.estimator, method.estimator)
    if isinstance(method, GBDA):
        return f"{kind} tau={method.tau:g}"
    return f"{kind} {_SHORT[method.temperature]}={method.tau0:g}"


def is_sparse(method: Estimator) -> bool:
    """Whether a draw is (almost) 0 but at the tokens that it has sampled."""
    return isinstance(method, REINFORCE) or method.estimator == "reinmax"


def as_estimator(method: Method[Any]) -> Estimator:
    """The method of a run; `InputError` if it is not an estimator."""
    if not isinstance(method, Estimator):
        raise InputError(
            "Expected a GradientStudy on DLMI, GBDA or REINFORCE, whose Z are logits of a "
            f"distribution, but the method is {type(method).__name__}. Leave the callback out."
        )
    if isinstance(method, DLMI) and method.next_token_tau is not None:
        raise InputError(
            "Expected `model.method.next_token_tau` to be unset with a GradientStudy, but got "
            f"{method.next_token_tau}: its loss has noise of its own."
        )
    return method


def along(run: Estimator, method: Estimator) -> Estimator:
    """An estimator with the loss, decode and samples of a run."""
    try:
        return replace(
            method, num_samples=run.num_samples, teacher_forcing=run.teacher_forcing, loss=run.loss
        )
    except InputError as error:
        raise InputError(
            f"Expected `study.estimators` to be without {label(method)} along this run. {error}"
        ) from error


def state_along(
    run: Estimator, run_state: Any, method: Estimator, pilot_loss: Callable[[], Tensor]
) -> Any:
    """The state that a method would have at this point of a run.

    A moving average of the loss is the run's, if it keeps the same one, otherwise the mean loss of
    prompts that no draw uses (`pilot_loss`): its noise adds a few per cent of variance, no bias.
    """
    if not isinstance(method, REINFORCE):
        return None
    if method.baseline in ("rloo", "none"):
        return REINFORCEState()
    is_same = isinstance(run, REINFORCE) and run.baseline == method.baseline
    kept: Tensor | None = run_state.average if is_same else None
    return REINFORCEState(pilot_loss() if kept is None else kept)


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
