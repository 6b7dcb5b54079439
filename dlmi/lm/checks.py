"""What a `transformers` model must be like to be inverted, and its embeddings."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dlmi.errors import InputError


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
