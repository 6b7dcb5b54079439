"""`python -m dlmi gradients`."""

import json
from pathlib import Path

import pytest

from dlmi.cli.main import main
from dlmi.gradient_rows import read_gradient_rows

CONFIGS = Path(__file__).parents[2] / "configs" / "gradients"


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["gradients", *map(str, arguments)])
    return stop.value.code or 0


@pytest.fixture
def tiny_flags(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [
        *("--data.lm", model_folder(), "--data.targets.k", "[1]", "--data.targets.per_k", 1),
        *("--data.targets.length", 3, "--run.prompt_length", 2, "--run.steps", 3),
        *("--run.num_samples", 2, "--study.variance_every", 2, "--study.bias_every", 2),
        *("--study.draws", 3, "--study.truth_samples", 12, "--study.truth_blocks", 3),
    ]


@pytest.mark.parametrize("name", ["small.yaml", "paper.yaml"])
def test_shipped_configs_run(name, tiny_flags, tmp_path, capsys):
    text = (CONFIGS / name).read_text()
    assert text.startswith("# ")
    assert f"python -m dlmi gradients --config configs/gradients/{name}" in text
    assert run("--config", CONFIGS / name, *tiny_flags, "--seeds", "[1]") == 0
    rows, notes = read_gradient_rows(tmp_path / "gradients")
    assert not notes
    assert {r.step for r in rows} <= {0, 2}
    assert len({r.estimator for r in rows}) == (11 if name == "small.yaml" else 7)
    out = capsys.readouterr().out
    assert "Kolmogorov-Smirnov" in out
    assert "GS tau=100" in out


def test_own_trajectories_differ_and_a_common_one_is_shared(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--study.estimators", "[reinforce, gs_tau1]", "--seeds", "[1,2]"]
    assert run(*flags, "--out", "own") == 0
    assert run(*flags, "--out", "common", "--trajectory", "gs_shared_tau1") == 0
    own, _ = read_gradient_rows(tmp_path / "own")
    common, _ = read_gradient_rows(tmp_path / "common")
    assert {r.trajectory for r in own} == {"own"}
    assert {r.trajectory for r in common} == {"GS L tau0=1"}
    assert {r.seed for r in own} == {r.seed for r in common} == {1, 2}
    first = json.loads((tmp_path / "own" / "gradients.jsonl").read_text().splitlines()[0])
    assert set(first["variance_max"]) == {"value", "low", "high"}
    assert run(*flags, "--out", "own") == 2  # nothing is overwritten


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trajectory", "nope"], "trajectory"),
        (["--study.estimators", "[nope]"], "estimators"),
        (["--study.estimators", "[]"], "`study.estimators`"),
        (["--study.draws", "2"], "`study.draws` to be at least 3"),
        (["--study.bias_every", "0"], "`study.bias_every`"),
        (["--study.truth_blocks", "2"], "`study.truth_blocks` to be at least 3"),
        (["--study.truth_samples", "5"], "`study.truth_samples`"),
        (["--study.coordinates", "0"], "`study.coordinates`"),
        (["--study.truth", "exact", "--run.prompt_length", "9"], "`truth: exact`"),
        (["--study.truth", "guess"], "truth"),
        (["--run.steps", "0"], "`run.steps`"),
        (["--run.lr", "0"], "`run.lr`"),
        (["--run.num_samples", "1"], "num_samples"),
        (["--seeds", "[]"], "`--seeds`"),
        (["--out", "a_file"], "`--out`"),
        (["--data.targets.k", "[40]"], "`data.targets.k`"),
        (["--data.targets.per_k", "0"], "`data.targets.per_k`"),
        (["--nonsense", "1"], "nonsense"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "run: null"], "`run"),
        (
            ["--config", "run: {prompt_length: null}"],
            "`run.prompt_length` to be a whole number, but got null",
        ),
        (["--config", "trajectory: null"], "`trajectory`"),
    ],
)
def test_bad_input_is_one_clear_line(flags, expected, tiny_flags, tmp_path, capfd):
    (tmp_path / "a_file").write_text("")
    assert run(*tiny_flags, *flags) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("dlmi: error: "), lines
    assert expected in lines[-1]
    assert len(lines) == 1, lines
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a_file"], "left something behind"
