"""What a user of Lightning expects of a trainer's options, through the command line."""

import csv
import os

import pytest
import yaml
from helpers.command_line import run
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from dlmi import DLMI, Inverter, read_rows

CALLBACKS = "lightning.pytorch.callbacks"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def flags(model_folder):
    return [
        *("--data.lm", str(model_folder()), "--data.targets.k", "[1,3]"),
        *("--data.targets.per_k", "2", "--data.targets.length", "4"),
        *("--data.batch_size", "2", "--trainer.accelerator", "cpu"),
        *("--model.method", "DLMI", "--model.method.num_samples", "2"),
        *("--model.prompt_length", "4", "--model.steps", "12", "--model.eval_every", "4"),
    ]


def with_trainer(path, **settings):
    path.write_text(yaml.safe_dump({"trainer": settings}))
    return ["--config", path]


def test_any_logger_gets_every_scalar(flags, tmp_path, capsys):
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "csv"]
    assert run("fit", *flags, *logger) == 0
    folder = tmp_path / "csv" / "lightning_logs" / "version_0"
    assert "results and CSV in csv/lightning_logs/version_0" in capsys.readouterr().out
    assert len(read_rows(folder)) == 4
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {name: [row[name] for row in rows if row[name]] for name in rows[0]}
    assert len(found["eval/lcs"]) >= 6  # at the start, on the beat and at the end of each pair
    assert found["train/loss"]
    assert found["finished/mean_lcs"]
    assert sum(name.startswith("targets/") for name in found) == 4
    assert rows[0]["eval/lcs"]
    assert rows[0]["targets/k1_sample0"]  # the scalars of a step are on one line
    assert "epoch" not in found
    assert sorted(os.listdir(tmp_path)) == ["csv"]


class FolderlessLogger(Logger):
    """Knows a project and a run, as W&B's and MLflow's, and no folder."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    name, version, save_dir = "project", "run7", "runs"

    def log_metrics(self, metrics, step=None):
        self.seen.update(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        self.seen.update(params)


def test_a_logger_without_folders_gets_scalars_and_the_run_a_folder(flags, tmp_path):
    logger = ["--trainer.logger", f"{__name__}.FolderlessLogger"]
    assert run("fit", *flags, *logger) == 0
    assert len(read_rows(tmp_path / "runs" / "project" / "run7")) == 4
    assert (tmp_path / "runs" / "project" / "run7" / "config.yaml").exists()
    assert sorted(os.listdir(tmp_path)) == ["runs"]


def test_python_users_find_lcs_in_the_metrics_of_the_trainer(data, tmp_path):
    logger = CSVLogger(tmp_path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=-1, accelerator="cpu", logger=logger, **quiet)
    inverter = Inverter(DLMI(num_samples=2), 4, steps=8, eval_every=4)
    trainer.fit(inverter, datamodule=data())
    mean = sum(row.lcs for row in inverter.finished) / 4
    assert float(trainer.callback_metrics["eval/best_lcs"]) == pytest.approx(mean)
    assert "eval/lcs" in trainer.callback_metrics


def test_model_checkpoint_monitors_lcs_and_its_file_resumes(flags, tmp_path):
    path = f"{CALLBACKS}.ModelCheckpoint"
    options = {"monitor": "eval/lcs", "mode": "max", "every_n_train_steps": 4, "save_top_k": 2}
    options["filename"] = "best-{step}"
    keep = with_trainer(
        tmp_path / "keep.yaml", callbacks=[{"class_path": path, "init_args": options}]
    )
    assert run("fit", *flags, *keep, "--trainer.max_steps", "9") == 0
    folder = tmp_path / "lightning_logs" / "version_0"
    best = sorted((folder / "checkpoints").glob("best-step=*.ckpt"))
    assert [file.stem for file in best] == ["best-step=4", "best-step=8"]
    assert run("fit", *flags, *keep, "--ckpt_path", best[0]) == 0
    assert len(read_rows(folder)) == 4


def early_stopping(tmp_path, **options):
    stop = {"class_path": f"{CALLBACKS}.EarlyStopping", "init_args": options}
    return with_trainer(tmp_path / "stop.yaml", callbacks=[stop])


def test_early_stopping_looks_at_each_evaluation(flags, tmp_path, capsys):
    # Any LCS is above the threshold: the first evaluation ends the run.
    options = {"monitor": "eval/lcs", "mode": "max", "stopping_threshold": -1.0}
    assert run("fit", *flags, *early_stopping(tmp_path, **options)) == 0
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert [row.stop_reason for row in rows] == ["interrupted"] * 2
    assert max(row.steps for row in rows) == 1
    assert "targets are not finished" in capsys.readouterr().err


def test_early_stopping_with_patience_sees_no_improvement(flags, tmp_path):
    options = {"monitor": "eval/best_lcs", "mode": "max", "patience": 2, "min_delta": 1.0}
    assert run("fit", *flags, *early_stopping(tmp_path, **options)) == 0
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert max(row.steps for row in rows) == 9  # evaluations after 0, 4 and 8 steps


@pytest.mark.parametrize("name", ["EarlyStopping", "ModelCheckpoint"])
def test_a_monitor_that_is_never_measured_is_one_line(name, flags, tmp_path, capfd):
    callback = {"class_path": f"{CALLBACKS}.{name}", "init_args": {"monitor": "val_loss"}}
    settings = with_trainer(tmp_path / "c.yaml", callbacks=[callback])
    assert run("fit", *flags, *settings) == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"dlmi: error: Expected {name} to monitor one of ")
    assert "eval/lcs" in line
    assert line.endswith("but got val_loss.")


def test_max_time_ends_a_run_that_resumes(flags, tmp_path, capsys):
    slow = ["--model.steps", "100000", "--trainer.max_time", "00:00:00:02"]
    assert run("fit", *flags, *slow) == 0
    assert "Resume with:" in capsys.readouterr().err
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert {row.stop_reason for row in rows} <= {"interrupted", "solved"}
    assert "interrupted" in {row.stop_reason for row in rows}


def test_last_is_the_checkpoint_of_the_newest_run(flags, tmp_path, capfd):
    assert run("fit", *flags, "--ckpt_path", "last") == 2
    assert "Expected a run with a checkpoint below lightning_logs" in capfd.readouterr().err
    for _ in range(2):
        assert run("fit", *flags, "--trainer.max_steps", "3") == 0
    assert run("fit", *flags, "--ckpt_path", "last") == 0
    first, second = (read_rows(tmp_path / f"lightning_logs/version_{i}") for i in (0, 1))
    assert {row.stop_reason for row in first} == {"interrupted"}
    assert "interrupted" not in {row.stop_reason for row in second}
    assert len(second) == 4


@pytest.mark.parametrize("value", ["true", "1", "3"])
def test_fast_dev_run_leaves_nothing_behind(value, flags, tmp_path, capsys):
    assert run("fit", *flags, "--trainer.fast_dev_run", value) == 0
    assert os.listdir(tmp_path) == []
    captured = capsys.readouterr()
    assert "Honest results" in captured.out
    assert "Resume" not in captured.err


def test_a_run_without_a_logger_has_a_folder_all_the_same(flags, tmp_path):
    flags = [*flags, "--trainer.logger", "false"]
    for _ in range(2):
        assert run("fit", *flags) == 0
    assert run("fit", *flags, "--trainer.max_steps", "3") == 0
    assert run("fit", *flags, "--ckpt_path", "last") == 0
    assert os.listdir(tmp_path) == ["lightning_logs"]
    names = sorted(os.listdir(tmp_path / "lightning_logs"))
    assert names == ["version_0", "version_1", "version_2"]
    assert all(len(read_rows(tmp_path / "lightning_logs" / name)) == 4 for name in names)


@pytest.mark.parametrize("value", ["true", "false"])
def test_seed_everything_may_be_left_to_lightning(value, flags, tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert run("fit", *flags, "--seed_everything", value) == 0
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert {row.seed for row in rows} == {0}


def test_a_logger_that_is_not_installed_is_told_with_its_cause(flags, capfd):
    assert run("fit", *flags, "--trainer.logger", "WandbLogger") == 2
    [line] = capfd.readouterr().err.strip().splitlines()
    assert "Expected `trainer.logger` WandbLogger to be usable, but wandb>=" in line
    assert line.endswith(" is not installed. `pip install -U wandb`.")
