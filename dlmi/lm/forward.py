"""A `transformers` model: what it must be like, its embeddings, and one pass, compiled or not."""

import inspect
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from dlmi.errors import InputError, first_line
from dlmi.lm.memory import is_out_of_memory
from dlmi.lm.precision import PassPrecision
from dlmi.lm.prefix import Prefix, empty_cache, make_cache


def read_embedding_matrix(model: Any) -> Tensor:
    """The vector of each id after the embedding module, which scales it in Gemma and others."""
    module = model.get_input_embeddings()
    if type(module) is nn.Embedding:
        weight: Tensor = module.weight.detach()
        return weight
    with torch.no_grad():
        rows = torch.arange(module.weight.shape[0], device=module.weight.device)
        vectors: Tensor = module(rows)
    return vectors


@torch.no_grad()
def check_invertible(model: Any, name: str, ids: Tensor, embedding_matrix: Tensor) -> None:
    """Raise `InputError` for a model without soft prompts or not causal; tried on ids, (1, L)."""
    this = f"{name} ({type(model).__name__})"
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"{this} does not accept `inputs_embeds`, so a soft prompt cannot be fed to it. "
            "Choose another model."
        )
    by_ids = model(input_ids=ids, use_cache=False).logits.float()
    by_embeds = model(inputs_embeds=embedding_matrix[ids], use_cache=False).logits.float()
    tolerance = 0.02 * by_ids.abs().max().clamp_min(1e-6)
    if (by_ids - by_embeds).abs().max() > tolerance:
        raise InputError(
            f"{this} answers differently to token ids and to their embeddings, so soft prompts "
            "do not work. Choose another model."
        )
    other_ids = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
    by_other = model(input_ids=other_ids, use_cache=False).logits.float()
    if (by_ids - by_other)[:, :-1].abs().max() > tolerance:
        raise InputError(
            f"{this} is not causal: a later token changes an earlier prediction, as in encoder "
            "models. Choose a decoder LM."
        )


class Forward:
    """Embeddings to logits by a model of `transformers`."""

    def __init__(self, model: Any, precision: PassPrecision) -> None:
        self._model = model
        self._precision = precision
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._compiled: Any = None
        self._compiles: bool | None = None  # None: not tried yet; False: given up
        self.takes_caches = False  # whether it is known that a cache of ours is like its own
        # Cut out of longer rows, the last positions are a batch of matrices, which PyTorch would
        # multiply one by one, reading the whole head for each.
        model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: (inputs[0].contiguous(), *inputs[1:])
        )

    def __call__(
        self,
        inputs_embeds: Tensor,
        keep: int,
        prefix: Prefix | None = None,
        cache: Any = None,
        use_cache: bool = False,
        is_compiled: bool = False,
    ) -> tuple[Tensor, Any]:
        """Logits of the last positions, (R, T, d) to (R, keep, V), and the cache.

        The input comes after a prefix, after a cache, or at the start. Only passes with a gradient
        and no cache are ever compiled.
        """
        if prefix is not None:
            cache = make_cache(prefix.layers, len(prefix), rows=len(inputs_embeds))
        use_cache = use_cache or cache is not None
        is_compiled = is_compiled and self._compiles is not False
        if is_compiled and inputs_embeds.requires_grad and not use_cache:
            logits, cache = self._run_compiled(inputs_embeds, keep), None
        else:
            if cache is None and self.takes_caches:
                cache = empty_cache(keeps=use_cache)
            output = self._call(inputs_embeds, keep, cache, use_cache)
            logits, cache = output.logits[:, -keep:], getattr(output, "past_key_values", None)
        # To the device of the prompts (the head may be on another), in float32 or better.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(inputs_embeds.device, dtype), cache

    def _run_compiled(self, inputs_embeds: Tensor, keep: int) -> Tensor:
        self._compiles = True
        try:
            self._compiled = self._compiled or torch.compile(self._run)
            logits: Tensor = self._compiled(inputs_embeds, keep)
        except Exception as error:  # no C++ compiler, an unsupported layer, ...
            if not self.gives_up_compiling(error):
                raise
            return self._run(inputs_embeds, keep)
        return logits

    def gives_up_compiling(self, error: Exception) -> bool:
        """Stop compiling after an error that may come from it; False if it does not.

        A backward pass is compiled when it runs, so its caller asks this and makes the pass again.
        """
        if not self._compiles or is_out_of_memory(error):
            return False
        self._compiles = False
        reason = f"{type(error).__name__}: {first_line(error)}"
        rank_zero_warn(f"The LM is not compiled, because that failed: {reason}")
        return True

    def _run(self, inputs_embeds: Tensor, keep: int) -> Tensor:
        logits: Tensor = self._call(inputs_embeds, keep, None, False).logits[:, -keep:]
        return logits

    def _call(self, inputs_embeds: Tensor, keep: int, cache: Any, use_cache: bool) -> Any:
        """The model's output; its head runs on the last `keep` positions only, if it can."""
        kwargs = {"logits_to_keep": keep} if self._keeps_logits else {}
        with self._precision.around_pass(inputs_embeds.device.type):
            return self._model(
                inputs_embeds=inputs_embeds, past_key_values=cache, use_cache=use_cache, **kwargs
            )
