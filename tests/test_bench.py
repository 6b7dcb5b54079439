"""The benchmark's own arithmetic, and a whole run on the tiny LM."""

import json

import pytest
import torch

from dlmi import load_lm
from dlmi.bench import command, scaling, steps
from dlmi.bench.refill import time_refill, unequal_targets
from dlmi.bench.steps import Floor
from dlmi.bench.textbook import Textbook, TextbookProcess
from dlmi.bench.timing import matmul_flops, peak_of
from dlmi.cli import main

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
    assert 1e8 < matmul_flops(CPU, torch.float32, size=256) < 1e14


def test_operations_are_those_of_the_passes(lm):
    """Two per weight and token, forward and backward, the head on the target positions only.

    Attention makes two products forward and five backward.
    """
    floor = Floor(lm, 5, 3, torch.tensor([[4, 5, 6, 7]]))
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32  # q and o, k and v, the gated MLP
    attention = (2 + 5) * 2 * 2 * 3 * 8 * 8 * 16  # operations, layers, rows, tokens, tokens, width
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


def test_growth_is_fitted():
    assert scaling.fit_exponent([10, 20, 40], [1.0, 2.0, 4.0]) == pytest.approx(1)
    assert scaling.fit_exponent([10, 20, 40], [3.0, 3.0, 3.0]) == pytest.approx(0)


def test_static_batches_give_the_same_and_pass_more_rows(lm):
    """Counted, not timed: on a tiny LM a pass costs the same whatever its rows."""
    times = time_refill(lm, steps=40)
    assert times.targets == 16
    assert len(set(times.steps)) > 2  # unequal, as promised
    assert times.refill_rows == sum(times.steps)
    batches = [times.steps[start : start + 4] for start in range(0, 16, 4)]
    assert times.static_rows == sum(4 * max(batch) for batch in batches)
    assert times.static_rows > times.refill_rows
    assert times.refill_seconds > 0
    assert times.static_seconds > 0
    assert {len(target.ids) for target in unequal_targets(lm)} == {1, 2}


def test_the_command_measures_prints_and_writes(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "SHAPES", ((5, 4, 3), (10, 4, 1)))
    monkeypatch.setattr(scaling, "SIZES", {"N": (5, 10), "V": (8, 31), "slots": (1, 2)})
    out = tmp_path / "bench.json"
    options = ["bench", "--lm", str(model_folder()), "--repeats", "3", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 0
    screen = capsys.readouterr().out
    assert "step / floor" in screen
    assert "refilled at once" in screen
    report = json.loads(out.read_text())
    assert report["model"] == str(model_folder())
    assert report["matmul_gflops"] > 0
    first = report["steps"][0]
    assert first["step / floor"] == pytest.approx(first["seconds"] / first["floor_seconds"])
    assert first["token_passes_per_second"] == pytest.approx(2 * 3 * 8 / first["seconds"])
    assert first["textbook_peak_bytes"] > first["floor_peak_bytes"] > 0
    assert [growth["name"] for growth in report["scaling"]] == ["N", "V", "slots"]
    with pytest.raises(SystemExit) as ended:
        main(options)  # nothing is overwritten
    assert ended.value.code == 2


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_step_is_timed_if_asked(lm, model_folder):
    with TextbookProcess(str(model_folder()), "float32", CPU, threads=1) as textbook:
        line = steps.time_steps(lm, textbook, (5, 4, 2), repeats=2, flops=1e10, compiled=True)
    assert line.compiled_seconds is not None
    assert "compiled step / floor" in line.ratios()


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
