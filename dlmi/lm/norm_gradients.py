"""Gradients that weigh the residual stream more than the branches beside it."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from dlmi.lm.frozen_lm import FrozenLM

NormGradientScale = float | Literal["auto"]  # `auto`: what suits the LM (`dlmi.run.norm_scale`)


@contextlib.contextmanager
def scaled_norm_gradients(lm: FrozenLM, factor: float) -> Iterator[None]:
    """Scale the gradients at the outputs of norm layers, for passes made inside this context.

    The forward pass is unchanged. Each branch of a block starts with a norm, so a factor below 1
    weakens the branches against the residual stream.
    """
    if factor == 1:
        yield
        return

    def scale(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    with contextlib.ExitStack() as hooks, lm.not_compiled():
        for module in lm.model.modules():
            if type(module).__name__.endswith("Norm"):
                hooks.callback(module.register_forward_hook(scale).remove)
        yield
