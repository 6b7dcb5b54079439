"""Found prompts decoded again: rows of any age hold, and prompts are tried elsewhere."""

import dataclasses
import json
import shutil

import pytest
import torch
from helpers.command_line import run
from helpers.golden import GOLDEN, make_lm
from helpers.methods import SMALL
from helpers.tiny_models import make_config, make_tokenizer
from transformers import AutoModelForCausalLM

from dlmi import DLMI, Inverter, load_lm
from dlmi.metrics import lcs_ratio
from dlmi.rows import Inversion, read_rows
from dlmi.run.callbacks.results import ResultWriter
from dlmi.scoring.verification import try_row, verify_row


@pytest.fixture
def run_folder(data, fit, tmp_path):
    """A run with rows that are exact and rows that are not."""
    model = Inverter(DLMI(tau0=1.0, num_samples=4, lr=0.4), **{**SMALL, "steps": 40})
    fit(model, data(k=(1, 6), length=2), callbacks=[ResultWriter()])
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
    return run("verify", *arguments)


# What a row has from where it was measured, which recorded cases leave out.
ELSEWHERE = {"seconds": 0.0, "model": "tiny", "revision": None, "device": "cpu", "versions": {}}
KINDS = ("plain", "template", "chat", "shared", "reasoning", "prompt_bos", "round_trip", "easy")


@pytest.fixture(scope="module")
def earlier_rows():
    """By kind, the first row of an earlier version: `frame`, no `metrics`, flat settings."""
    found = {}
    for line in (GOLDEN / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        kind = case["case"].split("/")[1]
        if kind in KINDS and kind not in found:
            trace = [{"seconds": 0.0, **point} for point in case["row"]["trace"]]
            row = Inversion.from_json({**ELSEWHERE, **case["row"], "trace": trace})
            found[kind] = case["data"], row
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_earlier_version_hold(kind, earlier_rows, tmp_path):
    data, row = earlier_rows[kind]
    folder = make_lm(data["lm"].strip("<>"), tmp_path)
    lm = load_lm(str(folder), "float64", bos=data.get("bos"))
    verified = verify_row(lm, row)
    assert verified.problems == ()
    assert (verified.exact, verified.text_exact) == (row.exact, row.round_trip_lcs == 1)
    tried = try_row(lm, row)
    assert (tried.exact, tried.lcs, tried.text_lcs) == (row.exact, row.lcs, row.round_trip_lcs)
    other = dataclasses.replace(row, prompt_ids=row.prompt_ids[::-1])
    assert any(
        "prompt_text is recorded as" in problem for problem in verify_row(lm, other).problems
    )
    if kind == "prompt_bos":
        without = {**row.settings, "prompt_bos": False}
        assert verify_row(lm, dataclasses.replace(row, settings=without)).problems != ()


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
