"""Passes in another dtype than measurements."""

import itertools
import json

import pytest
import torch
from helpers.methods import METHODS, make_inverter
from helpers.resuming import stop_and_resume
from helpers.weights import weights_hash

from dlmi import Inverter, load_lm
from dlmi.lm import pass_dtype
from dlmi.lm.measured import measured_file
from dlmi.lm.pass_dtype import choose_dtype, in_dtype, pass_copy
from dlmi.methods import GCG, SwapSearch
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import evaluate_alone
from dlmi.scoring.passes import Account, Pass, Swaps
from dlmi.tokens.vocabulary import Vocabulary


@pytest.fixture
def lm(model_folder):
    return load_lm(str(model_folder()), dtype="float32")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DLMI_CACHE", str(tmp_path / "cache"))


def timed(monkeypatch, **seconds):
    """Let passes in each dtype take so long."""
    monkeypatch.setattr(pass_dtype, "_seconds", lambda lm: seconds[lm.dtype_name])


def test_a_copy_has_other_weights_and_the_same_positions(lm):
    before = weights_hash(lm)
    copy = in_dtype(lm, torch.bfloat16)
    assert {p.dtype for p in copy.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copy.model.buffers() if b.is_floating_point()} == {torch.float32}
    assert in_dtype(lm, torch.bfloat16) is copy
    assert in_dtype(lm, torch.float32) is lm
    assert weights_hash(lm) == before
    ids = torch.tensor([[3, 5, 7, 9]])
    of_copy, own = (one.last_logits(one.embed(ids), 2) for one in (copy, lm))
    assert torch.allclose(of_copy, own, atol=0.05 * float(own.abs().max()))
    assert not torch.equal(of_copy, own)


def test_the_faster_dtype_is_measured_once(lm, monkeypatch):
    timed(monkeypatch, float32=1.0, bfloat16=0.5)
    assert choose_dtype(lm, "auto") == torch.bfloat16
    timed(monkeypatch)  # would fail
    assert choose_dtype(lm, "auto") == torch.bfloat16
    [kept] = json.loads(measured_file().read_text()).values()
    assert kept == {"dtype": "bfloat16", "seconds": {"float32": 1.0, "bfloat16": 0.5}}


def test_a_small_gain_is_not_worth_a_copy(lm, monkeypatch):
    timed(monkeypatch, float32=1.0, bfloat16=0.95)
    assert pass_copy(lm, "auto") is lm
    assert not lm.copies


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"pass', "null"])
def test_a_broken_file_is_measured_anew(lm, monkeypatch, content):
    measured_file().parent.mkdir()
    measured_file().write_text(content)
    timed(monkeypatch, float32=1.0, bfloat16=0.5)
    assert choose_dtype(lm, "auto") == torch.bfloat16
    assert len(json.loads(measured_file().read_text())) == 1


def test_a_folder_that_cannot_be_written_is_no_error(lm, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    timed(monkeypatch, float32=1.0, bfloat16=0.5)
    assert choose_dtype(lm, "auto") == torch.bfloat16


def test_real_passes_are_timed(lm):
    assert choose_dtype(lm, "auto") in (torch.float32, torch.bfloat16)
    [kept] = json.loads(measured_file().read_text()).values()
    assert min(kept["seconds"].values()) > 0


def test_a_copy_that_does_not_fit_is_not_made(lm, monkeypatch):
    monkeypatch.setattr(pass_dtype, "free_memory", lambda device: 1000)
    assert choose_dtype(lm, "auto") == torch.float32
    with pytest.warns(UserWarning, match="no room for a copy of the LM in torch.bfloat16"):
        assert pass_copy(lm, "bfloat16") is lm


def test_measured_passes_are_those_of_the_lm(tiny, data):
    module = data()
    module.load()
    vocabulary = Vocabulary(tiny)
    plain, mixed = Engine(vocabulary), Engine(vocabulary)
    mixed.read_with(in_dtype(tiny, torch.float32))
    ids = torch.tensor([[4, 8, 15, 16], [4, 8, 23, 7]])
    target = module.targets[0]
    asked = {"prompts": ids, "examples": target.examples, "like_ids": ids[0]}
    account = Account()
    cost = mixed.price(Pass(**asked), account)
    # What was read in one dtype has to be read again in the other.
    assert mixed.price(Pass(**asked, is_measured=True), account) == cost
    [expected] = plain([Pass(**asked)])
    fast, measured = mixed([Pass(**asked), Pass(**asked, is_measured=True)])
    assert torch.equal(measured.losses, expected.losses)
    assert 0 < (fast.losses - expected.losses).abs().max() < 1e-3
    tokens = vocabulary.for_target(target, 0)
    swaps = Pass(ids[:1], target.examples, swaps=Swaps(tokens, 3))
    [of_copy], [of_lm] = mixed([swaps]), plain([swaps])
    assert torch.equal(of_copy.swap_ids, of_lm.swap_ids)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_row_says_is_measured_by_the_lm(name, data, fit):
    module = data()
    module.load()
    before = weights_hash(module.lm)
    rows = fit(make_inverter(name, pass_dtype="float32"), module)
    by_id = {target.id: target for target in module.targets}
    for row in rows.values():
        assert row.settings["pass_dtype"] == "float32"
        assert row.dtype == "float64"
        found = evaluate_alone(module.lm, row.prompt_ids, by_id[row.target_id], 0)
        assert found.output_ids == row.output_ids
        assert found.discrete_loss == pytest.approx(row.discrete_loss, abs=1e-12)
    assert weights_hash(module.lm) == before


@pytest.mark.parametrize("method", [SwapSearch(width=8, window=4), GCG(search_width=8, topk=8)])
def test_a_search_confirms_what_it_keeps(method, data, fit):
    """In bfloat16 candidates are ranked roughly, but no step makes the prompt worse."""
    options = {"prompt_length": 6, "steps": 25, "eval_every": 1, "pass_dtype": "bfloat16"}
    rows = fit(Inverter(method, **options), data())
    for row in rows.values():
        losses = [point.discrete_loss for point in row.trace]
        if isinstance(method, GCG):
            assert all(new <= old + 1e-12 for old, new in itertools.pairwise(losses))
        assert losses[-1] < losses[0]


def test_a_resumed_run_keeps_the_dtype_that_was_chosen(data, fit, tmp_path, monkeypatch):
    """Though the machine that it goes on with would choose another."""
    seconds = iter([0.5, 2.0])

    def make():
        measured_file().unlink(missing_ok=True)
        timed(monkeypatch, float32=1.0, bfloat16=next(seconds))
        return make_inverter("gcg", pass_dtype="auto", steps=20)

    rows = stop_and_resume(make, lambda: data(dtype="float32"), fit, tmp_path)
    assert len(rows) == 4
    assert {row.settings["pass_dtype"] for row in rows.values()} == {"bfloat16"}
    assert next(seconds, None) is None
