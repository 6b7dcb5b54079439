"""Found prompts in other dtypes and models: the table, its file, and what is refused."""

import json
import shutil

import pytest
import torch
from conftest import SMALL, make_config, make_tokenizer
from transformers import AutoModelForCausalLM

from dlmi import DLMI, load_lm
from dlmi.callbacks import ResultWriter
from dlmi.cli import main
from dlmi.metrics import lcs_ratio
from dlmi.results import read_rows
from dlmi.transfer import try_row


@pytest.fixture
def run_folder(data, fit, tmp_path):
    """A run with rows that are exact and rows that are not."""
    model = DLMI(**{**SMALL, "steps": 40}, tau0=1.0, num_samples=4, lr=0.4)
    fit(model, data(k=(1, 6), target_length=2), callbacks=[ResultWriter()])
    rows = read_rows(tmp_path)
    assert 0 < sum(row.exact for row in rows) < len(rows)
    return tmp_path


@pytest.fixture
def sibling(model_folder, tmp_path):
    """Another model with the same tokenizer, and one whose tokens stand in another order."""

    def folder(reordered=False):
        path = tmp_path / f"sibling{reordered}"
        shutil.copytree(model_folder(), path)
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(make_config("llama")).save_pretrained(path)
        if reordered:
            file = path / "tokenizer.json"
            swapped = file.read_text().replace('"w3"', "#").replace('"w4"', '"w3"')
            file.write_text(swapped.replace("#", '"w4"'))
        return path

    return folder


def verify(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["verify", *map(str, arguments)])
    return stop.value.code


def test_another_model_is_tried_with_ids_and_with_text(run_folder, sibling, tmp_path, capsys):
    other, out = sibling(), tmp_path / "tried.jsonl"
    code = verify(run_folder, "--lm", other, "--dtype", "[float64,float32]", "--out", out)
    assert code == 0  # what works elsewhere was never promised
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = {row.target_id: row for row in read_rows(run_folder)}
    assert len(lines) == 2 * len(rows)
    lm = load_lm(str(other), "float64")
    for line in lines[: len(rows)]:
        row = rows[line["target_id"]]
        said = lm.greedy(torch.tensor([row.prompt_ids]), len(row.target_ids))[0].tolist()
        assert (line["model"], line["dtype"]) == (str(other), "float64")
        assert line["lcs"] == line["text_lcs"] == lcs_ratio(row.target_ids, said)
        assert line["exact"] == (tuple(said) == row.target_ids)
        assert (line["was_lcs"], line["was_exact"]) == (row.lcs, row.exact)
    still = sum(line["exact"] for line in lines[: len(rows)] if line["was_exact"])
    assert f"{still} of {sum(row.exact for row in rows.values())}" in capsys.readouterr().out


def test_the_rows_own_model_is_as_recorded(run_folder):
    rows = read_rows(run_folder)
    lm = load_lm(rows[0].model, "float64")
    for row in rows:
        tried = try_row(lm, row)
        assert (tried.exact, tried.lcs, tried.text_lcs) == (row.exact, row.lcs, row.round_trip_lcs)
        assert try_row(lm, row, as_text=True).text_lcs == row.round_trip_lcs
        assert try_row(lm, row, as_text=True).lcs is None


def test_another_tokenizer_is_refused_unless_text_goes_over(run_folder, sibling, capsys):
    """The same tokens under other ids: a comparison of sizes would not notice."""
    other = sibling(reordered=True)
    assert len(load_lm(str(other)).tokenizer) == len(make_tokenizer())
    assert verify(run_folder, "--lm", other) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(other) in error
    assert "2 ids mean something else (id 6 is 'w4', not 'w3')" in error
    assert "--as_text true" in error
    assert verify(run_folder, "--lm", other, "--as_text", "true") == 0


def test_what_would_be_ignored_or_overwritten_is_refused(run_folder, capsys):
    assert verify(run_folder, "--out", run_folder / "new.jsonl") == 2
    assert "`--lm` or `--dtype`" in capsys.readouterr().err
    assert verify(run_folder, "--dtype", "float32", "--out", run_folder / "results.jsonl") == 2
    assert "exists" in capsys.readouterr().err
