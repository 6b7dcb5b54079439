"""The benchmark's own arithmetic, and a whole run on the tiny LM."""

import json

import pytest
import torch

from dlmi import load_lm
from dlmi.bench.steps import Floor
from dlmi.bench.textbook import Textbook
from dlmi.bench.timing import matmul_flops, peak_of
from dlmi.cli import bench as command
from dlmi.cli.main import main

CPU = torch.device("cpu")


@pytest.fixture
def lm(model_folder):
    return load_lm(str(model_folder()), dtype="float32")


def test_peak_counts_what_is_held_at_once():
    def work():
        first = torch.empty(1_000_000)
        del first
        second = torch.empty(2_000_000)
        third = torch.empty(500_000)
        return second, third

    assert 10_000_000 <= peak_of(work, CPU) < 10_100_000


def test_matmul_speed_is_plausible():
    assert 1e8 < matmul_flops(CPU, torch.float32, (256, 128, 64)) < 1e14


def test_operations_are_those_of_the_passes(lm):
    """Two per weight and token, forward and backward, the head on the target positions only.

    Attention makes two products forward and four backward.
    """
    floor = Floor(lm, 5, 3, torch.tensor([[4, 5, 6, 7]]))
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32  # q and o, k and v, the gated MLP
    attention = (2 + 4) * 2 * 2 * 3 * 8 * 8 * 16  # operations, layers, rows, tokens, tokens, width
    passes = 4 * 3 * (8 * 2 * layer + 32 * 16 * 4) + attention
    assert floor.operations() == passes + 4 * 3 * 5 * 31 * 16


def test_textbook_learns_what_this_tool_learns(lm):
    """It is a reference only if it really optimises."""
    torch.manual_seed(0)
    textbook = Textbook(lm, 5, 4, torch.tensor([[4, 5]]), tau0=1.0)
    before = textbook.logits.detach().clone(), textbook.phi.detach().clone()
    textbook.step()
    assert textbook.logits.grad.abs().max() > 0
    assert not torch.equal(before[0], textbook.logits)
    assert not torch.equal(before[1], textbook.phi)


def test_the_command_measures_prints_and_writes(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "SHAPES", ((5, 4, 3), (10, 4, 1)))
    monkeypatch.setattr(command, "SEARCHES", ((5, 4, 1), (5, 4, 3)))
    out = tmp_path / "bench.json"
    options = ["bench", "--lm", str(model_folder()), "--repeats", "3", "--out", str(out)]
    options += ["--token_budget", "1500"]
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 0
    screen = capsys.readouterr().out
    assert "step / floor" in screen
    assert "floor: what no implementation can leave out" in screen
    report = json.loads(out.read_text())
    assert report["model"] == str(model_folder())
    assert report["matmul_gflops"] > 0
    first = report["steps"][0]
    assert first["step / floor"] == pytest.approx(first["seconds"] / first["floor_seconds"])
    assert first["token_passes_per_second"] == pytest.approx(2 * 3 * 8 / first["seconds"])
    assert first["textbook_peak_bytes"] > first["floor_peak_bytes"] > 0
    assert 0 < first["matmul_share"] < 1
    alone, beside = report["searches"]
    assert (alone["slots"], beside["slots"]) == (1, 3)
    for line in (alone, beside):
        parts = [line[name] for name in ("evaluation", "gradient", "candidates")]
        assert all(share > 0 for share in parts)
        assert sum(parts) < 1
        assert line["token_passes_per_second"] > 0
        assert line["matmul_share"] > 0
    assert beside["calls_per_step"] < 2 * alone["calls_per_step"]  # slots share them
    assert beside["tokens_per_call"] > alone["tokens_per_call"]
    assert "SwapSearch" in screen
    with pytest.raises(SystemExit) as ended:
        main(options)  # nothing is overwritten
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--repeats", "0"], "repeats"),
        (["--parts", "[speed]"], "parts"),
        (["--out", "no/such/folder/bench.json"], "--out"),
    ],
)
def test_bad_options(options, expected, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *options])
    assert ended.value.code == 2
    assert expected in capfd.readouterr().err
