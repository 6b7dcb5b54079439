"""Slots in a checkpoint, one by one.

A slot depends only on its own tensors, their optimizer state and its own numbers, so it can go on
in any slot of any worker: a run may be resumed with other slots, other workers or both.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from dlmi.methods.base import Method
from dlmi.methods.slot import Slot, to_plain
from dlmi.run.checkpoints import broken_is_input_error, find_checkpoints, read_checkpoint

# Attributes of a slot that a checkpoint holds under their own names, each of its declared type.
_NAMES = (
    *("step", "seconds", "cost", "known", "known_measured", "best", "last", "trace"),
    *("loss", "output_ids", "found_ids", "reasoned_ids", "reasoning", "diagnostics"),
    *("is_spent", "failure"),
)
_TYPES = get_type_hints(Slot)


def pack_slot(slot: Slot, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """A slot as plain values and tensors; loads with `weights_only=True`."""
    moments = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    return {
        **{name: to_plain(getattr(slot, name)) for name in _NAMES},
        "trace": [to_plain(point) for point in slot.trace],
        "target_id": slot.target.id,
        "trained_on": [example.id for example in slot.trained_on],
        "rng": slot.rng.get_state(),
        "state": to_plain(slot.state),
        "params": {name: p.detach().clone() for name, p in slot.params.items()},
        "moments": {name: dict(moments.get(p, {})) for name, p in slot.params.items()},
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
        others = [other for other in find_checkpoints(path.parent) if other.name != path.name]
        with broken_is_input_error(str(path)):
            found = [read_checkpoint(other, mmap=True)["inversion"] for other in others]
            return cls([saved, *(o for o in found if o["identity"] == saved["identity"])])

    def __contains__(self, target_id: str) -> bool:
        return target_id in self._slots

    @torch.no_grad()
    def restore(self, slot: Slot, method: Method[Any], optimizers: Sequence[Optimizer]) -> None:
        """Fill a slot that was opened for a target with what was saved of it."""
        saved = self._slots.pop(slot.target.id)
        with broken_is_input_error(f"what it holds of target {slot.target.id}"):
            for name in _NAMES:
                setattr(slot, name, msgspec.convert(saved[name], _TYPES[name]))
            slot.rng.set_state(saved["rng"].cpu())  # wherever it was loaded to
            slot.state = method.restore(saved["state"])
            by_id = {example.id: example for example in slot.target.examples}
            slot.trained_on = tuple(by_id[example_id] for example_id in saved["trained_on"])
            for name, parameter in slot.params.items():
                parameter.copy_(saved["params"][name].view_as(parameter))
            for optimizer in optimizers:
                _set_moments(optimizer, slot, saved["moments"])


def _set_moments(optimizer: Optimizer, slot: Slot, moments: Mapping[str, dict[str, Any]]) -> None:
    """Give a slot's tensors their optimizer state back; torch moves it to the right device."""
    names = {id(parameter): name for name, parameter in slot.params.items()}
    state = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, parameter in enumerate(parameters):
        if (name := names.get(id(parameter))) and moments[name]:
            for value in moments[name].values():
                if isinstance(value, Tensor) and value.shape not in ((), parameter.shape):
                    raise ValueError(f"optimizer state of shape {tuple(value.shape)}")
            state["state"][place] = copy.deepcopy(moments[name])  # may be a file in memory
    optimizer.load_state_dict(state)
