"""Slots on their way into a checkpoint and out of it again, one by one.

A slot's future depends on its own tensors, its optimiser's moments and its own numbers only, so it
can go on in any slot of any worker: a run may be resumed with other slots, other workers or both.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.methods.base import Method
from dlmi.methods.slot import Slot
from dlmi.methods.states import from_plain, to_plain
from dlmi.rows import TracePoint
from dlmi.run.checkpoints import find_checkpoints, read_checkpoint
from dlmi.scoring.evaluation import Evaluation
from dlmi.scoring.passes import Cost

# Attributes of a slot that a checkpoint holds as they are.
_PLAIN = ("step", "seconds", "loss", "output_ids", "found_ids", "is_spent", "failure")


def pack_slot(slot: Slot, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """A slot as plain values and tensors; loads with `weights_only=True`."""
    return {
        **{name: getattr(slot, name) for name in _PLAIN},
        "target_id": slot.target.id,
        "rng": slot.rng.get_state(),
        "state": to_plain(slot.state),
        "cost": to_plain(slot.cost),
        "known": list(slot.known),
        "best": to_plain(slot.best),
        "last": to_plain(slot.last),
        "trace": [dataclasses.asdict(point) for point in slot.trace],
        "trained_on": [example.id for example in slot.trained_on],
        "reasoned_ids": slot.reasoned_ids,
        "reasoning": dict(slot.reasoning),
        "diagnostics": dict(slot.diagnostics),
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
        found = [saved]
        for other in find_checkpoints(path.parent):
            if other.name != path.name:
                beside = read_checkpoint(other, mmap=True).get("inversion", {})
                if beside.get("identity") == saved["identity"]:
                    found.append(beside)
        return cls(found)

    def __contains__(self, target_id: str) -> bool:
        return target_id in self._slots

    @torch.no_grad()
    def restore(self, slot: Slot, method: Method[Any], optimizers: Sequence[Optimizer]) -> None:
        """Put a target back to work, in a slot that was opened for it."""
        saved = self._slots.pop(slot.target.id)
        for name in _PLAIN:
            setattr(slot, name, saved[name])
        slot.rng.set_state(saved["rng"].cpu())
        slot.state = method.restore(saved["state"])
        slot.cost = Cost(**saved["cost"])
        slot.known = [tuple(ids) for ids in saved["known"]]
        slot.best, slot.last = (from_plain(Evaluation, saved[name]) for name in ("best", "last"))
        slot.trace = [TracePoint(**point) for point in saved["trace"]]
        by_id = {example.id: example for example in slot.target.examples}
        slot.trained_on = tuple(by_id[example_id] for example_id in saved["trained_on"])
        slot.reasoned_ids, slot.reasoning = saved["reasoned_ids"], dict(saved["reasoning"])
        slot.diagnostics = dict(saved["diagnostics"])
        for name, parameter in slot.params.items():
            parameter.copy_(saved["params"][name])
            _set_moments(optimizers, parameter, saved["moments"][name])


def _moments(optimizers: Sequence[Optimizer], parameter: nn.Parameter) -> dict[str, Any]:
    for optimizer in optimizers:
        if parameter in optimizer.state:
            return dict(optimizer.state[parameter])
    return {}


def _set_moments(
    optimizers: Sequence[Optimizer], parameter: nn.Parameter, moments: dict[str, Any]
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
