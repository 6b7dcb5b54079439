"""Mixed precision: what the LM's passes run in, while all around them stays float32.

Lightning turns autocast on around a whole training step. There it would reach the products that
make a soft prompt, and round the gradient of Z away; so it is turned off for the step and on again
for the LM alone.
"""

import contextlib
from collections.abc import Iterator

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision


class PassPrecision:
    """What the passes of one LM run in."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None  # of the matrix products; None: the LM's own

    @contextlib.contextmanager
    def set_to(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Another dtype within; None is the LM's own."""
        before, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = before

    @contextlib.contextmanager
    def as_outside(self, device_type: str) -> Iterator[None]:
        """Within, the autocast that is on outside reaches the LM's passes and nothing else."""
        is_on = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_on else None
        with torch.autocast(device_type, enabled=False), self.set_to(dtype):
            yield

    def around_pass(self, device_type: str) -> torch.autocast:
        """What a pass of the LM runs under, whatever is on outside."""
        return torch.autocast(device_type, self.dtype, enabled=self.dtype is not None)


def drop_gradient_scaler(trainer: Trainer) -> None:
    """Take out Lightning's scaler of float16 gradients.

    A pass scales its own gradients and gives them back in float32, where nothing is lost any more.
    The scaler would only skip the step of all targets where one of them overflows.
    """
    if isinstance(plugin := trainer.precision_plugin, MixedPrecision):
        plugin.scaler = None
