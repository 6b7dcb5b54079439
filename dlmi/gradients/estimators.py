"""The estimators that are measured: methods by name, each measured by its own step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from dlmi.errors import InputError
from dlmi.methods.base import Method
from dlmi.methods.dlmi import DLMI
from dlmi.methods.gbda import GBDA
from dlmi.methods.reinforce import REINFORCE, REINFORCEState

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
