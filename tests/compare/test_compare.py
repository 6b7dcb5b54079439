"""The grid: its plan, its cells as ordinary runs, restarts, failures, mistakes."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.cells_in_process import run_cells_in_process
from helpers.command_line import CONFIGS, run
from helpers.subprocess_runs import ROOT

from dlmi import read_rows
from dlmi.cli.compare import _print_results
from dlmi.cli.fit import plan_fit
from dlmi.compare.display import GridDisplay
from dlmi.compare.grid import Grid, MethodSpec, plan
from dlmi.errors import InputError
from dlmi.report.loading import best_point, load
from dlmi.run.callbacks.results import lock_folder

SODA = {"SODA": {"config": "soda.yaml"}}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def in_process(monkeypatch):
    run_cells_in_process(monkeypatch)


def settings_of(model_folder, **changes):
    """A grid of two methods on the tiny LM; `changes` replace what it says."""
    settings = {
        "out": "runs/grid",
        "methods": {"DLMI(1)": {"config": "dlmi_tau1.yaml", "method": {"num_samples": 2}}, **SODA},
        "prompt_lengths": [4],
        "steps": [4, 12],
        "eval_every": 4,
        "data": {
            "lm": str(model_folder()),
            "dtype": "float64",
            "targets": {
                "class_path": "ByRank",
                "init_args": {"k": [1, 3], "per_k": 1, "length": 4},
            },
            "batch_size": 2,
        },
        "trainer": {"accelerator": "cpu"},
    }
    return {**settings, **changes}


@pytest.fixture
def grid(model_folder):
    return lambda **changes: settings_of(model_folder, **changes)


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    """The grid, run once."""
    root = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(root), pytest.MonkeyPatch.context() as monkeypatch:
        run_cells_in_process(monkeypatch)
        file = write(settings_of(model_folder))
        assert run("compare", "--config", file) == 0
    return root


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished grid to play with, in the current folder."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    return tmp_path / "runs" / "grid"


def write(settings):
    """The grid as a file; its methods' configs are those of the project."""
    methods = {
        label: {**spec, "config": str(CONFIGS / spec["config"])}
        for label, spec in settings["methods"].items()
    }
    file = Path("grid.yaml")
    file.write_text(yaml.safe_dump({**settings, "methods": methods}))
    return file


def as_grid(settings):
    methods = {label: MethodSpec(**spec) for label, spec in settings["methods"].items()}
    return Grid(**{**settings, "methods": methods})


def test_a_plan_is_the_product_with_the_first_seed_first(grid):
    settings = grid(seeds=[7, 8], prompt_lengths=[4, 5])
    cells = plan(as_grid(settings), CONFIGS, plan_fit)
    assert [cell.name for cell in cells] == [
        f"{label}-N{length}-seed{seed}"
        for seed in (7, 8)
        for length in (4, 5)
        for label in ("DLMI_1", "SODA")
    ]
    last = cells[-1]
    assert last.settings["model"]["seed"] == 8
    assert last.settings["model"]["steps"] == 12
    assert last.overrides["seed_everything"] == 8
    assert cells[0].settings["model"]["seed"] == 7
    assert cells[0].settings["model"]["method"]["init_args"]["num_samples"] == 2


def test_seeds_are_planned_as_fit_would_see_them(grid):
    cell = plan(as_grid(grid(seeds=[7, 8])), CONFIGS, plan_fit)[-1]
    settings, *_ = plan_fit(cell.config, cell.overrides)
    assert cell.settings["model"] == json.loads(json.dumps(settings["model"]))


def test_settings_of_the_run_hold_for_all_methods_but_those_with_their_own(grid):
    own = {"DLMI(1)": {"config": "dlmi_tau1.yaml", "model": {"forbid_target_tokens": "stems"}}}
    settings = grid(methods={**own, **SODA}, model={"forbid_target_tokens": "words"})
    first, second = plan(as_grid(settings), CONFIGS, plan_fit)
    assert first.settings["model"]["forbid_target_tokens"] == "stems"
    assert second.settings["model"]["forbid_target_tokens"] == "words"


def test_models_are_an_axis(grid, model_folder):
    other = {"lm": str(model_folder("gpt2")), "load": {"bos": "<eos>"}}
    cells = plan(as_grid(grid(models={"a": {}, "b": other})), CONFIGS, plan_fit)
    assert [cell.name for cell in cells][::2] == ["a-DLMI_1-N4-seed0", "b-DLMI_1-N4-seed0"]
    assert cells[-1].settings["data"]["lm"] == other["lm"]


def test_planned_cost_bounds_what_is_spent(grid, copied):
    for cell in plan(as_grid(grid()), CONFIGS, plan_fit):
        rows = read_rows(copied / cell.name)
        assert sum(row.forward_tokens + row.backward_tokens for row in rows) <= cell.token_passes


def test_every_cell_is_an_ordinary_run(copied):
    """With its config, its log and its rows, which are those of `fit` with the same settings."""
    folder = copied / "DLMI_1-N4-seed0"
    assert {"config.yaml", "results.jsonl", "log.txt", "cell.json"} <= set(os.listdir(folder))
    logger = "--trainer.logger.init_args"
    flags = ["--continue_run", "false", f"{logger}.version", "again", f"{logger}.save_dir", "."]
    assert run("fit", "--config", folder / "config.yaml", *flags) == 0
    again = read_rows(Path("grid") / "again")
    for row, other in zip(read_rows(folder), again, strict=True):
        assert (row.prompt_ids, row.lcs, row.steps) == (other.prompt_ids, other.lcs, other.steps)


def test_a_report_finds_labels_and_budgets(copied):
    data = load([copied])
    [group] = data.groups
    assert [str(budget) for budget in group.budgets] == ["4 steps", "12 steps"]
    assert data.labels == ["DLMI(1)", "SODA"]


@pytest.mark.usefixtures("in_process")
def test_sizes_bring_their_target_lengths_and_budgets(grid):
    sizes = [{"prompt_length": 3}, {"prompt_length": 5, "target_length": 2, "budgets": [8, 2]}]
    settings = grid(prompt_lengths=[], sizes=sizes, methods=SODA)
    assert run("compare", "--config", write(settings)) == 0
    longer, shorter = sorted(
        load([Path(settings["out"])]).groups, key=lambda group: group.prompt_lengths
    )
    assert (longer.prompt_lengths, longer.budgets) == ([3], (("step", 4.0), ("step", 12.0)))
    assert (shorter.prompt_lengths, shorter.budgets) == ([5], (("step", 2.0), ("step", 8.0)))
    assert {len(row.target_ids) for row in longer.rows} == {4}
    assert {len(row.target_ids) for row in shorter.rows} == {2}
    assert {row.settings["steps"] for row in shorter.rows} == {8}


def test_a_plan_names_the_budgets_of_each_size(grid, capsys):
    sizes = [{"prompt_length": 3}, {"prompt_length": 5, "budgets": [2000]}]
    file = write(grid(prompt_lengths=[], sizes=sizes))
    assert run("compare", "--config", file, "--dry_run") == 0
    said = capsys.readouterr().out
    assert "budgets: 4, 12 steps per target (N = 3)" in said
    assert "budgets: 2,000 steps per target (N = 5)" in said


def test_token_budgets_are_an_axis_of_budgets(grid):
    """Its cell is a real process, as all cells are for a user."""
    settings = grid(steps=None, token_budgets=[60, 120], methods=SODA)
    assert run("compare", "--config", write(settings)) == 0
    [group] = load([Path(settings["out"])]).groups
    assert group.budgets == (("token_passes", 60.0), ("token_passes", 120.0))
    for row in group.rows:
        early, late = (best_point(row, group.budgets[i]) for i in (0, -1))
        assert early.token_passes <= 60
        assert late.lcs == row.lcs


def test_finished_cells_are_not_run_again(grid, copied, capsys):
    logs = sorted(copied.glob("*/log.txt"))
    before = [log.stat().st_mtime_ns for log in logs]
    assert run("compare", "--config", write(grid())) == 0
    assert [log.stat().st_mtime_ns for log in logs] == before
    out = capsys.readouterr().out
    assert "2 of them done" in out
    assert "python -m dlmi report runs/grid" in out


@pytest.mark.usefixtures("in_process")
def test_a_cell_goes_on_after_its_finished_rows(grid, copied):
    """As after a kill before the first checkpoint: rows that are there stay, the rest is run."""
    folder = copied / "SODA-N4-seed0"
    first, second = (folder / "results.jsonl").read_text().splitlines()
    (folder / "results.jsonl").write_text(first + "\n" + second[:50])
    record = json.loads((folder / "cell.json").read_text())
    record["is_done"] = False
    (folder / "cell.json").write_text(json.dumps(record))
    for checkpoint in folder.glob("checkpoints/*"):
        checkpoint.unlink()
    assert run("compare", "--config", write(grid())) == 0
    lines = (folder / "results.jsonl").read_text().splitlines()
    assert lines[0] == first
    again, expected = (json.loads(line) for line in (lines[1], second))
    for volatile in ("seconds", "trace"):
        del again[volatile], expected[volatile]
    assert again == expected


@pytest.mark.usefixtures("in_process")
def test_a_failed_cell_is_recorded_and_the_others_run(grid, capsys):
    """N=70 does not fit into the tiny LM's 64 positions, which only the run finds out."""
    settings = grid(prompt_lengths=[70, 4], methods=SODA)
    assert run("compare", "--config", write(settings)) == 1
    folder = Path(settings["out"])
    failure = json.loads((folder / "SODA-N70-seed0" / "failure.json").read_text())
    assert failure["exit_code"] == 2
    assert "Expected `model.prompt_length`" in failure["error"]
    assert len(read_rows(folder / "SODA-N4-seed0")) == 2
    out = capsys.readouterr().out
    assert "failed: SODA-N70-seed0" in out
    assert any("N70" in note for note in load([folder]).notes)


def test_a_plan_says_where_only_the_run_will_know_the_cost(grid, capsys):
    methods = {**SODA, "GCG": {"config": "gcg.yaml"}}
    assert run("compare", "--config", write(grid(methods=methods)), "--dry_run") == 0
    out = capsys.readouterr().out
    [gcg] = [line for line in out.splitlines() if "GCG-N4" in line]
    assert "unknown" in gcg
    assert "not counted: 1 cells" in out
    budgets = grid(methods=methods, steps=None, token_budgets=[500, 1000])
    assert run("compare", "--config", write(budgets), "--dry_run") == 0
    out = capsys.readouterr().out
    assert "unknown" not in out
    assert "4,000 token passes at most in all" in out  # 2 methods x 2 targets


def test_dry_run_runs_nothing(grid, capsys):
    file = write(grid())
    assert run("compare", "--config", file, "--dry_run", "--speed", "100") == 0
    out = capsys.readouterr().out
    assert "2 cells" in out
    assert "hours left" in out
    assert not Path(grid()["out"]).exists()


def test_ctrl_c_reaches_the_cell_which_gets_the_time_to_save(grid, tmp_path, monkeypatch):
    script, ready, saved = (tmp_path / name for name in ("cell.py", "ready", "saved"))
    script.write_text(
        "import pathlib, signal, time\n"
        f"save = lambda *_: [pathlib.Path({str(saved)!r}).touch(), exit(130)]\n"
        "signal.signal(signal.SIGINT, save)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "while True: time.sleep(0.05)\n"
    )
    command, popen = [sys.executable, str(script)], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen(command, **options))
    press = lambda display: ready.exists() and signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(GridDisplay, "tick", press)
    before = signal.getsignal(signal.SIGINT)
    settings = grid(methods=SODA)
    assert run("compare", "--config", write(settings)) == 130
    assert saved.exists()
    assert signal.getsignal(signal.SIGINT) is before
    record = json.loads((Path(settings["out"]) / "SODA-N4-seed0" / "cell.json").read_text())
    assert not record["is_done"]
    assert record["spent"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "either `steps` or `token_budgets`"),
        ({"seeds": [1, 1]}, "Expected `seeds` to differ"),
        ({"prompt_lengths": []}, "either `prompt_lengths` or `sizes`"),
        ({"sizes": [{"prompt_length": 2}]}, "either `prompt_lengths` or `sizes`"),
        (
            {"prompt_lengths": [], "sizes": [{"prompt_length": 2, "budgets": [0]}]},
            "Expected `budgets.smallest` to be at least 1",
        ),
        ({"prompt_lengths": [], "sizes": [{"prompt_length": 2}] * 2}, "Expected `sizes` to differ"),
        ({"methods": {}}, "Expected `methods`"),
        ({"methods": {"X": {"config": "nothing.yaml"}}}, "Expected `methods.X.config`"),
        (
            {"methods": {"X": {"config": "soda.yaml", "method": {"tau0": 1.0}}}},
            "Expected `methods.X` to be a run of `fit`: Expected options that exist, but got",
        ),
        (
            {"methods": {"X": {"config": "soda.yaml", "model": {"tau": 1.0}}}},
            "`model.tau`. Did you mean `model.method.tau` of GBDA?",
        ),
        (
            {"methods": {"X": {"config": "soda.yaml", "method": {"lr": -1.0}}}},
            "`model.method.lr` to be positive",
        ),
        (
            {"methods": {"X": {"config": "soda.yaml", "model": {"method": {"lr": 1.0}}}}},
            "`methods.X.method`",
        ),
        (
            {"methods": {"X": {"config": "soda.yaml", "model": {"steps": 3}}}},
            "leave `steps` to the grid",
        ),
        ({"model": {"seed": 3}}, "Expected `model` to leave `seed` to the grid"),
        ({"model": {"method": {}}}, "Expected `model` to leave `method` to `methods.NAME.method`"),
        (
            {"methods": {"A(1)": {"config": "soda.yaml"}, "A[1]": {"config": "soda.yaml"}}},
            "both make A_1-N4",
        ),
        ({"data": {"bogus": 1}}, "but got `data.bogus`"),
        ({"data": {"k": [1]}}, "`data.k`. Did you mean `data.targets.k` of ByRank?"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_bad_grids_are_told_in_one_line(grid, capsys, changes, message):
    assert run("compare", "--config", write(grid(**changes))) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not Path(grid()["out"]).exists()


def test_an_unknown_method_is_told_in_one_line(grid, capsys):
    Path("unknown.yaml").write_text("model: {method: {class_path: Magic}}\n")
    settings = grid(methods={"X": {"config": str(Path("unknown.yaml").absolute())}})
    assert run("compare", "--config", write(settings)) == 2
    assert "Expected `model.method` to be one of ADC, ARCA" in capsys.readouterr().err


def test_no_config_is_told_in_one_line(capsys):
    assert run("compare") == 2
    assert "configs/compare/small.yaml" in capsys.readouterr().err


@pytest.mark.usefixtures("copied")
def test_another_grid_in_the_same_folder_is_refused(grid, capsys):
    changed = grid()
    changed["data"]["targets"]["init_args"]["length"] = 3
    assert run("compare", "--config", write(changed)) == 2
    assert "data.targets.length = 4" in capsys.readouterr().err


def test_a_comparison_of_an_earlier_version_is_read_but_not_continued(grid, tmp_path, capsys):
    old = ROOT / "docs" / "benchmark" / "honest" / "SODA-N20-M8-seed2"
    folder = tmp_path / grid()["out"] / "SODA-N4-seed0"
    shutil.copytree(old, folder)
    assert run("compare", "--config", write(grid())) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "SODA-N4-seed0 to be a cell of this grid" in line
    assert "`python -m dlmi report` still reads this one" in line
    assert sorted(os.listdir(folder)) == sorted(os.listdir(old))
    data = load([folder])
    [label] = data.labels
    assert label.startswith("SODA")
    assert [budget.at for budget in data.groups[0].budgets] == [3000.0, 6000.0, 12000.0]


def test_a_second_comparison_in_the_same_folder_is_refused(grid, capsys):
    folder = Path(grid()["out"])
    with lock_folder(folder):
        assert run("compare", "--config", write(grid())) == 2
    assert "another process is writing" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.usefixtures("in_process")
def test_a_second_process_in_a_cell_is_refused(grid):
    """The lock of the folder: what a killed grid left running is not run beside."""
    settings = grid(methods=SODA)
    [cell] = plan(as_grid(settings), CONFIGS, plan_fit)
    with lock_folder(cell.folder):
        error = cell.run(lambda: None)
    assert error is not None
    assert "another process is writing" in error


@pytest.mark.parametrize("file", sorted((CONFIGS / "compare").iterdir()), ids=lambda f: f.stem)
def test_shipped_grids_plan(file, capsys):
    assert run("compare", "--config", file, "--dry_run") == 0
    assert "token passes at most in all" in capsys.readouterr().out


def test_errors_name_the_method_of_the_grid(grid):
    settings = as_grid(grid(methods={"X": {"config": "gcg.yaml", "method": {"tau": 1}}}))
    with pytest.raises(InputError, match="methods.X"):
        plan(settings, CONFIGS, plan_fit)


def test_names_of_the_grid_stay_in_its_folder(grid):
    soda = {"config": "soda.yaml"}
    methods = {"[/b]../../x\x1b[31m": soda, "???": soda}
    names = [cell.name for cell in plan(as_grid(grid(methods=methods)), CONFIGS, plan_fit)]
    assert names == ["b_.._.._x_31m-N4-seed0", "_-N4-seed0"]


def test_labels_and_models_are_shown_as_text(copied, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    [group] = load([copied]).groups
    hostile = "[/b]\x1b[31m"
    series = tuple(dataclasses.replace(s, label=hostile) for s in group.series)
    _print_results(dataclasses.replace(group, model=hostile, series=series))
    shown = capsys.readouterr().out
    assert shown.count("[/b]\\x1b[31m") == 1 + len(series)
    assert "\x1b" not in shown


@pytest.mark.parametrize("change", [{"settings": []}, {"spent": "long"}, {"is_done": 1}])
def test_a_cell_file_of_others_is_refused(copied, grid, change, capsys):
    file = copied / "SODA-N4-seed0" / "cell.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert run("compare", "--config", write(grid()), "--dry_run") == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "cell.json" in line
    assert f"`{next(iter(change))}`" in line
