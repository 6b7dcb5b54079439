"""Tiny real language models, made once per session, and the helpers that most tests need."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from lightning.pytorch import Trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from dlmi import TargetDataModule, load_lm
from dlmi.methods import ADC, DLMI, GBDA, GCG, PEZ, REINFORCE, SODA, EchoSearch

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


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Folder of a tiny model of a given kind, made on first use."""
    made: dict[str, Path] = {}

    def folder(kind: str = "llama") -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            if kind == "bert":
                config = BertConfig(vocab_size=VOCAB, **SIZES, intermediate_size=32)
                model = BertForMaskedLM(config)
            else:
                model = AutoModelForCausalLM.from_config(make_config(kind))
            model.save_pretrained(made[kind])
            make_tokenizer(bos=kind != "gpt2").save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def tiny(model_folder):
    """The tiny Llama in float64."""
    return load_lm(str(model_folder()), dtype="float64")


@pytest.fixture
def data(model_folder):
    """A data module on the tiny Llama; four targets unless told otherwise."""

    def make(**options) -> TargetDataModule:
        defaults = {
            "lm": str(model_folder()),
            "dtype": "float64",
            "batch_size": 2,
            "k": (1, 3),
            "per_k": 2,
            "target_length": 4,
        }
        return TargetDataModule(**{**defaults, **options})

    return make


@pytest.fixture
def fit(tmp_path):
    """Invert the targets of a data module; gives the finished rows by target id."""

    def run(model, data_module, ckpt_path=None, callbacks=(), **trainer_options):
        options = {
            "max_epochs": -1,
            "accelerator": "cpu",
            "default_root_dir": tmp_path,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": list(callbacks),
        }
        trainer = Trainer(**{**options, **trainer_options})
        trainer.fit(model, datamodule=data_module, ckpt_path=ckpt_path, weights_only=True)
        return {row.target_id: row for row in model.finished}

    return run


SMALL = {"prompt_length": 5, "steps": 12, "eval_every": 4}

# Small settings under which each method class of the package, and each of its ways, runs on the
# tiny LM. The contracts run for every row.
METHODS = {
    "dlmi": (DLMI, {"tau0": 1.0, "num_samples": 2}),
    "dlmi_shared_free_run": (
        DLMI,
        {"tau0": 2.0, "num_samples": 2, "temperature": "shared", "teacher_forcing": False},
    ),
    "dlmi_soft_next_token": (
        DLMI,
        {
            "tau0": 1.0,
            "num_samples": 8,
            "teacher_forcing": False,
            "next_token": "gumbel_softmax",
            "loss": "hinge",
            "lr": 0.4,
        },
    ),
    "dlmi_rao": (DLMI, {"tau0": 1.0, "num_samples": 2, "estimator": "gumbel_rao", "lr": 0.4}),
    "dlmi_fixed_reinmax": (
        DLMI,
        {"tau0": 1.0, "num_samples": 2, "temperature": "fixed", "estimator": "reinmax", "lr": 0.4},
    ),
    "gbda_annealed_final_samples": (
        GBDA,
        {"tau": 2.0, "tau_end": 0.5, "num_samples": 2, "final_samples": 6, "lr": 0.3},
    ),
    "dlmi_fluent": (
        DLMI,
        {"tau0": 1.0, "num_samples": 2, "estimator": "straight_through", "fluency": 0.3, "lr": 0.4},
    ),
    "reinforce": (REINFORCE, {"num_samples": 16, "lr": 0.3}),
    "reinforce_rloo": (
        REINFORCE,
        {"num_samples": 16, "baseline": "rloo", "teacher_forcing": True, "lr": 0.3},
    ),
    "soda": (SODA, {"reset_every": 25}),
    "soda_fluent": (SODA, {"reset_every": 25, "fluency": 0.3}),
    "gcg": (GCG, {"search_width": 16, "topk": 8}),
    "gcg_fluent": (GCG, {"search_width": 16, "topk": 8, "fluency": 0.3}),
    "pez": (PEZ, {"lr": 0.03}),
    "adc": (ADC, {"restarts": 2, "lr": 1.0, "norm_gradient_scale": 0.85}),
    "adc_refined": (ADC, {"restarts": 1, "lr": 1.0, "refine_after": 0.3, "refine_width": 8}),
    "echo_search": (EchoSearch, {"refine_width": 1, "starts": 1}),
    "echo_search_random": (EchoSearch, {"refine_width": 2, "starts": 3, "start": "random"}),
    "echo_search_window": (
        EchoSearch,
        {"refine_width": 2, "starts": 2, "window": 2, "horizon": 2},
    ),
    "soda_refined": (SODA, {"reset_every": 25, "refine_after": 0.8}),
    "dlmi_refined": (
        DLMI,
        {"num_samples": 2, "norm_gradient_scale": 0.85, "refine_after": 0.5, "lr": 0.4},
    ),
}


def _names(*without):
    """Rows of `METHODS` that leave some options alone."""
    return [name for name, (_, options) in METHODS.items() if not {*without} & {*options}]


def _maker(name):
    method, settings = METHODS[name]
    return lambda **options: method(**{**SMALL, **settings, **options})


@pytest.fixture(params=list(METHODS))
def make_method(request):
    """Each row of `METHODS` in turn, as a function of further options."""
    return _maker(request.param)


@pytest.fixture(params=_names("fluency"))
def make_framed_method(request):
    """Those that work in a template."""
    return _maker(request.param)


@pytest.fixture(params=[n for n in _names("fluency", "refine_after") if "echo" not in n])
def make_shared_method(request):
    """Those that learn one prompt for many examples."""
    return _maker(request.param)


@pytest.fixture(autouse=True)
def few_threads():
    """Tiny tensors run faster on one thread."""
    torch.set_num_threads(1)


def pytest_configure(config):
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A compiler's cache that a killed run left half-written would fail others.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="dlmi-inductor-")


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
