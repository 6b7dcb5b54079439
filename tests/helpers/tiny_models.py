"""Tiny models and their tokenizer."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

WORDS = [f"w{i}" for i in range(28)]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

VOCAB = 32


def make_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """A whitespace tokenizer of 31 or 32 tokens; without `bos` it has only EoS."""
    special = ["<unk>", "<eos>"] + (["<bos>"] if bos else [])
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "eos_token": "<eos>"}
    if bos:
        names["bos_token"] = "<bos>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_config(kind: str):
    common = {"vocab_size": VOCAB, "bos_token_id": 2, "eos_token_id": 1, "initializer_range": 0.6}
    wide = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 64}
    if kind == "llama":
        return LlamaConfig(**common, **wide, num_key_value_heads=1, tie_word_embeddings=True)
    if kind == "llama_untied":
        return LlamaConfig(**common, **wide, num_key_value_heads=2, tie_word_embeddings=False)
    if kind == "gpt2":
        return GPT2Config(**common, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    if kind == "gpt_neox":
        return GPTNeoXConfig(**common, **wide, rotary_pct=0.5)
    if kind == "qwen2":
        return Qwen2Config(**common, **wide, num_key_value_heads=1, tie_word_embeddings=True)
    if kind == "gemma":
        return GemmaConfig(**common, **wide, num_key_value_heads=1, head_dim=8)
    if kind == "mistral":  # a window that forgets: no cache to share
        return MistralConfig(**common, **wide, num_key_value_heads=1, sliding_window=4)
    raise ValueError(kind)


KINDS = ["llama", "llama_untied", "gpt2", "gpt_neox", "qwen2", "gemma", "mistral"]
