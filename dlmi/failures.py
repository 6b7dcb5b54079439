"""Targets that cannot go on: their loss or their gradient is not finite."""

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dlmi.inverter import Inverter


@torch.no_grad()
def mark_failures(module: "Inverter") -> None:
    """After a backward pass: note what failed, and keep its gradient from everything shared.

    Slots meet nowhere in the LM, so a row that is not a number spoils no other row. A loss scaler,
    though, looks at all gradients at once: a failed slot's gradient is therefore set to zero.
    """
    slots, names = module.active, list(module.parameter_shapes())
    numbers = []
    for slot in slots:
        assert slot.loss is not None
        numbers.append(slot.loss.float())
        gradients = [getattr(module, name)[slot.index].grad for name in names]
        numbers += [slot.loss.new_zeros(()) if g is None else g.sum().float() for g in gradients]
    values = iter(torch.stack(numbers).tolist())  # one wait for the device, not one per slot
    for slot in slots:
        found = {name: next(values) for name in ("loss", *names)}
        wrong = [name for name, value in found.items() if not math.isfinite(value)]
        if not wrong:
            continue
        what = f"the loss is {found['loss']}" if "loss" in wrong else f"{wrong[0]} has no gradient"
        slot.failure = f"{what} at step {slot.step}"
        for name in names:
            gradient = getattr(module, name)[slot.index].grad
            if gradient is not None:
                gradient.zero_()
