"""Mixed precision: autocast for the LM's passes alone, float32 for everything around them.

Lightning turns autocast on around a whole training step, where it would also reach the products
that make a soft prompt and round the gradient of Z away. So it is turned off for the step and on
again for each pass of the LM.
"""

import contextlib
from collections.abc import Iterator

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision


class PassPrecision:
    """The autocast dtype of an LM's passes; None is the LM's own dtype."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None

    @contextlib.contextmanager
    def set_to(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Use another dtype within the context."""
        before, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = before

    @contextlib.contextmanager
    def as_outside(self, device_type: str) -> Iterator[None]:
        """Within the context, apply the surrounding autocast to the LM's passes only."""
        is_on = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_on else None
        with torch.autocast(device_type, enabled=False), self.set_to(dtype):
            yield

    def around_pass(self, device_type: str) -> torch.autocast:
        """The autocast context of a pass, whatever surrounds it."""
        return torch.autocast(device_type, self.dtype, enabled=self.dtype is not None)


def drop_gradient_scaler(trainer: Trainer) -> None:
    """Remove Lightning's scaler of float16 gradients: passes scale their own.

    The scaler would skip the step of all targets where the gradient of one overflows.
    """
    if isinstance(plugin := trainer.precision_plugin, MixedPrecision):
        plugin.scaler = None
