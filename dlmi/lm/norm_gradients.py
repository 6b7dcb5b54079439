"""Gradients that listen more to the residual stream than to the branches beside it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dlmi.lm.frozen_lm import FrozenLM


@contextlib.contextmanager
def scaled_norm_gradients(lm: FrozenLM, factor: float) -> Iterator[None]:
    """Scale gradients where they leave a norm layer, for passes made inside this context.

    The forward pass is untouched. Inside a block the norm stands at the start of a branch, so a
    factor below 1 weakens what comes through the branches against the residual stream.
    """
    if factor == 1:
        yield
        return

    def scale(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    norms = [m for m in lm.model.modules() if type(m).__name__.endswith("Norm")]
    handles = [norm.register_forward_hook(scale) for norm in norms]
    try:
        with lm.not_compiled():
            yield
    finally:
        for handle in handles:
            handle.remove()
