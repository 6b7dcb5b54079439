"""What a `transformers` model must be like to be inverted, and what it reads for a token."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dlmi.errors import InputError


def read_embedding_matrix(model: Any) -> Tensor:
    """The vectors that a model reads for each id, whatever its embedding module does to them."""
    module = model.get_input_embeddings()
    if type(module) is nn.Embedding:
        weight: Tensor = module.weight.detach()
        return weight
    # Gemma and others scale inside the embedding module, so ask the module, not its weight.
    with torch.no_grad():
        rows = torch.arange(module.weight.shape[0], device=module.weight.device)
        vectors: Tensor = module(rows)
    return vectors


def gather_head_input(model: Any) -> None:
    """Let the head see the last positions of many rows as one matrix.

    Cut out of longer rows they are a batch of matrices, which PyTorch multiplies row by row,
    reading the whole head for each.
    """
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (inputs[0].contiguous(), *inputs[1:])
    )


@torch.no_grad()
def check_invertible(model: Any, name: str, ids: Tensor, embedding_matrix: Tensor) -> None:
    """Refuse what cannot be inverted, no soft prompts or not causal; some ids, (1, L), tell."""
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
            f"{this} answers differently to token ids and to their embeddings, so a soft "
            "prompt would mean something else. Choose another model."
        )
    other_ids = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
    by_other = model(input_ids=other_ids, use_cache=False).logits.float()
    if (by_ids - by_other)[:, :-1].abs().max() > tolerance:
        raise InputError(
            f"{this} is not causal: a later token changes an earlier prediction, as in encoder "
            "models. Choose a decoder LM."
        )


def find_bos_id(tokenizer: Any, bos: str | int | None, name: str) -> int:
    """The token that stands before a text: the override, else BoS, else EoS."""
    wanted = tokenizer.get_vocab().get(bos) if isinstance(bos, str) else bos
    if bos is not None and wanted is None:
        raise InputError(
            f"Expected `bos` to be a token of {name}, but got {bos!r}. Give the token's exact text "
            "or its id."
        )
    for candidate in (wanted, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    raise InputError(
        f"The tokenizer of {name} has neither BoS nor EoS, so there is nothing to start a target "
        "from. Name a token with `bos`, or give targets as `texts`."
    )
