"""Slots on their way into a checkpoint and out of it again, one by one.

A slot's future depends on its own tensors, its optimiser's moments and its own numbers only, so it
can go on in any slot of any worker: a run may be resumed with other slots, other workers or both.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.errors import InputError, first_line
from dlmi.methods.base import Method
from dlmi.methods.slot import Slot, to_plain
from dlmi.run.checkpoints import find_checkpoints, read_checkpoint

# Attributes of a slot that a checkpoint holds under their own names, each of its declared type.
_NAMES = (
    *("step", "seconds", "cost", "known", "known_measured", "best", "last", "trace"),
    *("loss", "output_ids", "found_ids", "reasoned_ids", "reasoning", "diagnostics"),
    *("is_spent", "failure"),
)
_TYPES = get_type_hints(Slot)


def pack_slot(slot: Slot, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """A slot as plain values and tensors; loads with `weights_only=True`."""
    return {
        **{name: to_plain(getattr(slot, name)) for name in _NAMES},
        "trace": [to_plain(point) for point in slot.trace],
        "target_id": slot.target.id,
        "trained_on": [example.id for example in slot.trained_on],
        "rng": slot.rng.get_state(),
        "state": to_plain(slot.state),
        "params": {name: p.detach().clone() for name, p in slot.params.items()},
        "moments": {name: _moments(optimizers, p) for name, p in slot.params.items()},
    }


class Resume:
    """Targets that were in flight when a run stopped.

    Args:
        checkpoints: The `inversion` of each, as it was saved, by any number of workers. Of a target
            that several hold, the one that got furthest counts.
    """

    def __init__(self, checkpoints: Iterable[Mapping[str, Any]] = ()) -> None:
        self.finished_ids: set[str] = set()
        self._slots: dict[str, dict[str, Any]] = {}
        for saved in checkpoints:
            self.finished_ids |= set(saved["finished_ids"])
            for slot in saved["slots"]:
                known = self._slots.get(slot["target_id"])
                if known is None or known["step"] < slot["step"]:
                    self._slots[slot["target_id"]] = slot

    @classmethod
    def of_all_workers(cls, saved: Mapping[str, Any], path: Path) -> "Resume":
        """A loaded checkpoint, and those that other workers of the same run left beside it."""
        with _broken_is_input_error():
            found = [saved]
            for other in find_checkpoints(path.parent):
                if other.name != path.name:
                    beside = read_checkpoint(other, mmap=True)["inversion"]
                    if beside["identity"] == saved["identity"]:
                        found.append(beside)
            return cls(found)

    def __contains__(self, target_id: str) -> bool:
        return target_id in self._slots

    @torch.no_grad()
    def restore(self, slot: Slot, method: Method[Any], optimizers: Sequence[Optimizer]) -> None:
        """Put a target back to work, in a slot that was opened for it."""
        saved = self._slots.pop(slot.target.id)
        with _broken_is_input_error():
            for name in _NAMES:
                setattr(slot, name, msgspec.convert(saved[name], _TYPES[name]))
            slot.rng.set_state(saved["rng"])
            slot.state = method.restore(saved["state"])
            by_id = {example.id: example for example in slot.target.examples}
            slot.trained_on = tuple(by_id[example_id] for example_id in saved["trained_on"])
            for name, parameter in slot.params.items():
                parameter.copy_(saved["params"][name].view_as(parameter))
                _set_moments(optimizers, parameter, saved["moments"][name])


@contextlib.contextmanager
def _broken_is_input_error() -> Iterator[None]:
    """Whatever does not fit in what a checkpoint holds is the file's fault."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            "Expected `ckpt_path` to be a whole checkpoint of this run, but what it holds does not "
            f"fit ({type(error).__name__}: {first_line(error)[:200]}). Give "
            "another, or delete it: `--continue_run true` keeps the rows of the run's folder."
        ) from error


def _moments(optimizers: Sequence[Optimizer], parameter: nn.Parameter) -> dict[str, Any]:
    for optimizer in optimizers:
        if parameter in optimizer.state:
            return dict(optimizer.state[parameter])
    return {}


def _set_moments(
    optimizers: Sequence[Optimizer], parameter: nn.Parameter, moments: dict[str, Any]
) -> None:
    if any(
        isinstance(m, Tensor) and m.shape not in ((), parameter.shape) for m in moments.values()
    ):
        raise ValueError("moments of another shape")
    for optimizer in optimizers if moments else ():
        for group in optimizer.param_groups:
            if any(parameter is other for other in group["params"]):
                on_host = () if group.get("fused") or group.get("capturable") else ("step",)
                optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=True)
                    if isinstance(value, Tensor) and key not in on_host
                    else value
                    for key, value in moments.items()
                }
