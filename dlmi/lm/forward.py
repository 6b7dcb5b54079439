"""One pass through a `transformers` model: which logits, in which precision, compiled or not."""

import inspect
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from dlmi.errors import first_line
from dlmi.lm.memory import is_out_of_memory
from dlmi.lm.packed import PackedPass, packed_attention
from dlmi.lm.precision import PassPrecision


class Forward:
    """Embeddings to logits by a model of `transformers`."""

    def __init__(self, model: Any, precision: PassPrecision) -> None:
        self._model = model
        self._precision = precision
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._compiled: Any = None
        self._can_compile = True

    def __call__(
        self, inputs_embeds: Tensor, keep: int, cache: Any, use_cache: bool, is_compiled: bool
    ) -> tuple[Tensor, Any]:
        """Logits of the last positions, (R, T, d) to (R, keep, V), and the cache.

        The cache that goes in holds what stands before; with `use_cache` one comes back. Only
        passes with a gradient and no cache are ever compiled.
        """
        cache_out = None
        is_plain = inputs_embeds.requires_grad and cache is None and not use_cache
        if is_compiled and is_plain and self._can_compile:
            logits = self._run_compiled(inputs_embeds, keep)
        else:
            output = self._call(inputs_embeds, keep, cache, use_cache or cache is not None)
            logits, cache_out = output.logits[:, -keep:], getattr(output, "past_key_values", None)
        # Where prompts are made (the head may lie elsewhere), in float32 or better.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(inputs_embeds.device, dtype), cache_out

    def packed(self, inputs_embeds: Tensor, now: PackedPass) -> Tensor:
        """Logits of a packed pass, (L, d) to (.., V)."""
        precision = self._precision.around_pass(inputs_embeds.device.type)
        with precision, packed_attention(self._model, now):
            logits: Tensor = self._model(
                inputs_embeds=inputs_embeds[None],
                position_ids=now.position_ids,
                use_cache=False,
                logits_to_keep=now.kept,
            ).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _run_compiled(self, inputs_embeds: Tensor, keep: int) -> Tensor:
        try:
            if self._compiled is None:
                self._compiled = torch.compile(self._run)
            logits: Tensor = self._compiled(inputs_embeds, keep)
        except Exception as error:  # a missing C++ compiler, a layer that it does not know, ...
            if is_out_of_memory(error):
                raise
            self._can_compile = False
            rank_zero_warn(
                f"The LM is not compiled, which failed: {type(error).__name__}: {first_line(error)}"
            )
            return self._run(inputs_embeds, keep)
        return logits

    def _run(self, inputs_embeds: Tensor, keep: int) -> Tensor:
        logits: Tensor = self._call(inputs_embeds, keep, None, False).logits[:, -keep:]
        return logits

    def _call(self, inputs_embeds: Tensor, keep: int, cache: Any, use_cache: bool) -> Any:
        """The model; its head runs on the last `keep` positions only, where it allows that."""
        kwargs = {"logits_to_keep": keep} if self._keeps_logits else {}
        with self._precision.around_pass(inputs_embeds.device.type):
            return self._model(
                inputs_embeds=inputs_embeds, past_key_values=cache, use_cache=use_cache, **kwargs
            )
