"""Targets that cannot go on: their loss or their gradient is not finite."""

import math
from collections.abc import Sequence

import torch

from dlmi.methods.slot import Slot


@torch.no_grad()
def mark_failures(slots: Sequence[Slot]) -> None:
    """After a backward pass: note what failed, and keep its gradient from everything shared.

    Slots meet nowhere in the LM, so a row that is NaN spoils no other row. A loss scaler, though,
    looks at all gradients at once: a failed slot's gradient is therefore set to zero.
    """
    slots = [slot for slot in slots if slot.loss is not None]
    numbers = []
    for slot in slots:
        assert slot.loss is not None
        loss = slot.loss.float()
        device = next((p.device for p in slot.params.values()), loss.device)
        numbers.append(loss.to(device))
        gradients = [parameter.grad for parameter in slot.params.values()]
        numbers += [numbers[-1].new_zeros(()) if g is None else g.sum().float() for g in gradients]
    values = iter(torch.stack(numbers).tolist() if numbers else [])  # one wait for the device
    for slot in slots:
        found = {name: next(values) for name in ("loss", *slot.params)}
        wrong = [name for name, value in found.items() if not math.isfinite(value)]
        if not wrong:
            continue
        what = f"the loss is {found['loss']}" if "loss" in wrong else f"{wrong[0]} has no gradient"
        slot.failure = f"{what} at step {slot.step}"
        for parameter in slot.params.values():
            if parameter.grad is not None:
                parameter.grad.zero_()
