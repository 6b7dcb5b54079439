"""Slots on their way into a checkpoint and out of it again, one by one.

A slot's future depends on its own tensors, its optimiser's moments and its own numbers only, so it
can go on in any slot of any rank: a run may be resumed with other slots, other ranks or both.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.checkpoints import find_checkpoints, read_checkpoint
from dlmi.slots import Slot
from dlmi.targets import Target

if TYPE_CHECKING:
    from dlmi.inverter import Inverter


def pack_slots(module: "Inverter") -> list[dict[str, Any]]:
    """The slots in flight as plain values and tensors; Z and Phi are in the state dict."""
    packed = []
    for slot in module.active:
        moments = {
            name: _moments(module.trainer.optimizers, getattr(module, name)[slot.index])
            for name in module.parameter_shapes()
        }
        packed.append({**slot.state(), "moments": moments})
    return packed


class SavedSlots:
    """Targets that were in flight when a run stopped.

    Args:
        checkpoints: As they were saved, by any number of ranks. Of a target that several hold, the
            one that got furthest counts.
    """

    def __init__(self, checkpoints: Iterable[Mapping[str, Any]] = ()) -> None:
        self.finished_ids: set[str] = set()
        self._slots: dict[str, tuple[dict[str, Any], Mapping[str, Tensor]]] = {}
        for checkpoint in checkpoints:
            saved = checkpoint["inversion"]
            self.finished_ids |= set(saved["finished_ids"])
            for state in saved["slots"]:
                known = self._slots.get(state["target_id"])
                if known is None or known[0]["step"] < state["step"]:
                    self._slots[state["target_id"]] = state, checkpoint["state_dict"]

    @classmethod
    def of_all_ranks(cls, checkpoint: Mapping[str, Any], path: Path) -> "SavedSlots":
        """A loaded checkpoint, and those that other ranks of the same run left beside it."""
        others = [other for other in find_checkpoints(path.parent) if other.name != path.name]
        found = [checkpoint]
        for other in others:
            beside = read_checkpoint(other, mmap=True)
            if beside.get("inversion", {}).get("identity") == checkpoint["inversion"]["identity"]:
                found.append(beside)
        return cls(found)

    def __contains__(self, target_id: str) -> bool:
        return target_id in self._slots

    @torch.no_grad()
    def restore(self, module: "Inverter", index: int, target: Target) -> Slot:
        """Put a target back to work, in a slot of any index."""
        state, tensors = self._slots.pop(target.id)
        state = dict(state)
        moments = state.pop("moments")
        for name in module.parameter_shapes():
            parameter = getattr(module, name)[index]
            parameter.copy_(tensors[f"{name}.{state['index']}"])
            _set_moments(module.trainer.optimizers, parameter, moments[name])
        return Slot.from_state({**state, "index": index}, {target.id: target}, module.device)


def _moments(optimizers: list[Optimizer], parameter: nn.Parameter) -> dict[str, Any]:
    for optimizer in optimizers:
        if parameter in optimizer.state:
            return dict(optimizer.state[parameter])
    return {}


def _set_moments(
    optimizers: list[Optimizer], parameter: nn.Parameter, moments: dict[str, Any]
) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(parameter is other for other in group["params"]):
                optimizer.state.pop(parameter, None)
                if moments:
                    on_host = () if group.get("fused") or group.get("capturable") else ("step",)
                    optimizer.state[parameter] = {
                        key: value.to(parameter.device, copy=True)
                        if isinstance(value, Tensor) and key not in on_host
                        else value
                        for key, value in moments.items()
                    }
