"""What a `transformers` model must be like to be inverted, and how it reads a token."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlmi.errors import InputError

if TYPE_CHECKING:
    from dlmi.lm.frozen_lm import FrozenLM


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
def check_invertible(lm: "FrozenLM") -> None:
    """Refuse by name what cannot be inverted: no soft prompts, or not causal."""
    this = f"{lm.name} ({type(lm.model).__name__})"
    if "inputs_embeds" not in inspect.signature(lm.model.forward).parameters:
        raise InputError(
            f"{this} does not accept `inputs_embeds`, so a soft prompt cannot be fed to it. "
            "Choose another model."
        )
    ids = lm.prompt_token_ids[torch.linspace(0, len(lm.prompt_token_ids) - 1, 4).long()]
    ids = ids[None].to(lm.device)
    by_ids = lm.model(input_ids=ids, use_cache=False).logits.float()
    by_embeds = lm.model(inputs_embeds=lm.embed(ids), use_cache=False).logits.float()
    scale = by_ids.abs().max().clamp_min(1e-6)
    if (by_ids - by_embeds).abs().max() > 0.02 * scale:
        raise InputError(
            f"{this} answers differently to token ids and to their embeddings, so a soft "
            "prompt would mean something else. Choose another model."
        )
    other_ids = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
    by_other = lm.model(input_ids=other_ids, use_cache=False).logits.float()
    if (by_ids - by_other)[:, :-1].abs().max() > 0.02 * scale:
        raise InputError(
            f"{this} is not causal: a later token changes an earlier prediction, as in encoder "
            "models. Choose a decoder LM."
        )


def check_ids(lm: "FrozenLM", ids: Sequence[int], what: str) -> None:
    """Raise `InputError` unless every id is a token that the LM can read and write."""
    rows = lm.embedding_matrix.shape[0]
    for token_id in ids:
        if not 0 <= token_id < rows:
            raise InputError(
                f"Expected {what} to hold token ids of {lm.name} (0 to {rows - 1}), "
                f"but got {token_id}. Was it made for another model?"
            )


def find_bos_id(lm: "FrozenLM", bos: str | int | None) -> int:
    """The token that stands before a text: the override, else BoS, else EoS."""
    if isinstance(bos, str):
        bos_id = lm.tokenizer.get_vocab().get(bos)
        if bos_id is None:
            raise InputError(
                f"Expected `bos` to be a token of {lm.name}, but got {bos!r}. "
                "Give the token's exact text or its id."
            )
        return int(bos_id)
    for candidate in (bos, lm.tokenizer.bos_token_id, lm.eos_id):
        if candidate is not None:
            lm.check_ids([candidate], "`bos`")
            return int(candidate)
    raise InputError(
        f"The tokenizer of {lm.name} has neither BoS nor EoS, so there is nothing to start "
        "a target from. Name a token with `bos`, or give targets as `texts`."
    )
