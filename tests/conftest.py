"""Tiny real language models, made once per session, and the helpers that most tests need."""

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from helpers import subprocess_runs
from helpers.methods import METHODS, RUN_OPTIONS, make_inverter
from helpers.tiny_models import SIZES, VOCAB, make_config, make_tokenizer
from lightning.pytorch import Trainer
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from dlmi import TargetDataModule, load_lm
from dlmi.targets.sources import ByRank, File, Texts


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
    """A data module on the tiny Llama; four targets unless told otherwise.

    `k`, `per_k` and `length` are those of `ByRank`; `texts` and `file` are in place of them.
    """

    def make(**options) -> TargetDataModule:
        ranks = {"k": (1, 3), "per_k": 2, "length": 4}
        ranks = {name: options.pop(name, value) for name, value in ranks.items()}
        if "texts" in options:
            source = Texts(list(options.pop("texts")))
        elif "file" in options:
            source = File(str(options.pop("file")))
        else:
            source = ByRank(**ranks)
        usual = {"lm": str(model_folder()), "dtype": "float64", "batch_size": 2, "targets": source}
        return TargetDataModule(**{**usual, **options})

    return make


@pytest.fixture
def fit(tmp_path):
    """Invert the targets of a data module; gives the finished rows by target id."""
    return partial(_fit, tmp_path)


def _fit(folder, model, data_module, ckpt_path=None, callbacks=(), **trainer_options):
    options = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    trainer = Trainer(**{**options, **trainer_options})
    trainer.fit(model, datamodule=data_module, ckpt_path=ckpt_path, weights_only=True)
    return {row.target_id: row for row in model.finished}


@pytest.fixture(scope="session")
def undisturbed(model_folder, tmp_path_factory):
    """What comes of the run of `subprocess_runs` if nothing happens to it, in one process."""
    source = ByRank(**subprocess_runs.TARGETS)
    module = TargetDataModule(lm=str(model_folder()), targets=source, **subprocess_runs.DATA)
    rows = _fit(tmp_path_factory.mktemp("undisturbed"), subprocess_runs.make_run(), module)
    return subprocess_runs.outcome(rows.values())


def _maker(name):
    return lambda **options: make_inverter(name, **options)


@pytest.fixture(params=list(METHODS))
def make_method(request):
    """Each row of `METHODS` in turn, as a function of further options of the inverter."""
    return _maker(request.param)


@pytest.fixture(params=[name for name in METHODS if name not in RUN_OPTIONS])
def make_framed_method(request):
    """Those that work in a template."""
    return _maker(request.param)


@pytest.fixture(params=[name for name in METHODS if name not in RUN_OPTIONS])
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
    # Of processes that tests start: threads that wait for one another in a spin waste the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # lightning's own calls
    # A compiler's cache that a killed run left half-written would fail others.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="dlmi-inductor-")


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
