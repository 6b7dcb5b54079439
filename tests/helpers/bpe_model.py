"""A tiny Llama whose tokens merge with their neighbours."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from helpers.tiny_models import make_config

MERGES = ["a b", "c d", "Ġ a", "Ġ A", "Ã ©", "ab cd", "Ġ ab", "b c"]
PIECES = ["<eos>", "<bos>", *"abcdAĠĊÃ©", *(merge.replace(" ", "") for merge in MERGES)]


def save_bpe_model(folder):
    """Two of its tokens are halves of an é."""
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make_config("llama")).save_pretrained(folder)


def ids_of(*pieces):
    return tuple(PIECES.index(piece) for piece in pieces)
