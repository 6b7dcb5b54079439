"""Small tensors between the host and a device, many in one copy.

A copy to the device is a launch of its own, and a copy to the host waits for all that the device
has still to do. So what passes need is collected and sent together.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")
Arrived = Callable[[], list[Tensor]]  # gives tensors on the device


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device, bit by bit the same, in one copy; those that are there stay."""
    found = list(tensors)
    away = [i for i, tensor in enumerate(tensors) if tensor.device != device]
    # The widest numbers first, so that each part begins at a multiple of its width.
    away.sort(key=lambda i: -tensors[i].element_size())
    if not away:
        return found
    raw = [_bytes_of(tensors[i]) for i in away]
    parts = torch.split(torch.cat(raw).to(device), [len(own) for own in raw])
    for i, part in zip(away, parts, strict=True):
        found[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    if flat.stride() != (1,):  # a view, or a single number out of one
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


class Parcel:
    """Small tensors of the host for a device: all go in one copy, when the first one is needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: list[Tensor] = []
        self._sent = 0  # how many of them are on the device

    def add(self, *tensors: Tensor) -> Arrived:
        """Add tensors; gives what returns them on the device."""
        first, end = len(self._tensors), len(self._tensors) + len(tensors)
        self._tensors += tensors

        def arrived() -> list[Tensor]:
            if end > self._sent:
                self._tensors[self._sent :] = moved(self._tensors[self._sent :], self.device)
                self._sent = len(self._tensors)
            return self._tensors[first:end]

        return arrived
