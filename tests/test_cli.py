"""The command line as a user meets it: help, configs, runs, resume, mistakes."""

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
import yaml
from subprocess_runs import ROOT, outcome_in, start, wait_for_rows

from dlmi import __version__, read_rows
from dlmi.cli import COMMANDS, main

CONFIGS = ROOT / "configs"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny_flags(model_folder):
    return [
        *("--data.lm", str(model_folder()), "--data.k", "[1,3]", "--data.per_k", "2"),
        *("--data.target_length", "4", "--data.batch_size", "2", "--trainer.accelerator", "cpu"),
    ]


MODEL_FLAGS = ["--model", "DLMI", "--model.prompt_length", "4", "--model.num_samples", "2"]


def run(*arguments):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code or 0


def config_files():
    names = (path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
    # data/ is included by others; compare/ and gradients/ are for other commands; the others have
    # targets of their own (test_templates, test_shared_prompts).
    other = ("data/", "compare/", "gradients/", "templates/", "prompt_engineering/")
    return sorted(name for name in names if not name.startswith(other))


def test_help_names_every_command(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command}" in out for command in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_of_every_command(command, capsys):
    assert run(command, "--help") == 0
    assert f"usage: python -m dlmi {command}" in capsys.readouterr().out


def test_help_of_a_method_is_its_docstring(capsys):
    assert run("fit", "--model.help", "DLMI") == 0
    assert "Gumbel samples per step" in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"dlmi {__version__}\n"


def test_python_m_dlmi_runs_without_arguments():
    done = subprocess.run([sys.executable, "-m", "dlmi"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "usage: python -m dlmi COMMAND" in done.stdout


def test_print_config_round_trips(capsys, tiny_flags, tmp_path):
    assert run("fit", "--config", CONFIGS / "dlmi_tau100.yaml", *tiny_flags, "--print_config") == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    assert run("fit", "--config", tmp_path / "printed.yaml", "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed)


@pytest.mark.parametrize("name", config_files())
def test_every_shipped_yaml_fits_for_two_steps(name, tiny_flags, tmp_path, capsys):
    base = [] if not name.startswith("parts/") else ["--config", CONFIGS / "dlmi_tau100.yaml"]
    flags = ["--model.steps", "2", "--model.prompt_length", "6", "--data.dtype", "float32"]
    flags += ["--data.bos", "<bos>"]
    if name == "gcg.yaml":
        flags += ["--model.topk", "8", "--model.search_width", "8"]
    assert run("fit", *base, "--config", CONFIGS / name, *tiny_flags, *flags) == 0
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert len(rows) == 4
    assert all(row.steps == 2 or row.stop_reason == "solved" for row in rows)
    header = (CONFIGS / name).read_text().split("\n")
    assert header[0].startswith("# ")
    assert any("python -m dlmi fit --config" in line for line in header[:6])


def test_a_run_folder_holds_what_a_user_needs(tiny_flags, tmp_path, capsys):
    assert run("fit", *MODEL_FLAGS, "--model.steps", "6", *tiny_flags) == 0
    folder = tmp_path / "lightning_logs" / "version_0"
    names = {path.name.split(".")[0] for path in folder.iterdir()}
    assert names >= {"config", "events", "hparams", "results"}
    out = capsys.readouterr().out
    assert "4 targets, N=4" in out
    assert "Honest results" in out
    assert run("fit", "--config", folder / "config.yaml") == 0  # the same again, in its own folder
    again = read_rows(tmp_path / "lightning_logs" / "version_1")
    assert [r.prompt_ids for r in again] == [r.prompt_ids for r in read_rows(folder)]


def test_seed_everything_is_the_seed(tiny_flags, tmp_path):
    for seed in ("1", "2"):
        flags = ["--seed_everything", seed, "--model.steps", "2"]
        assert run("fit", *MODEL_FLAGS, *tiny_flags, *flags) == 0
    first, second = (read_rows(tmp_path / f"lightning_logs/version_{i}") for i in (0, 1))
    assert [row.seed for row in (*first, *second)] == [1] * 4 + [2] * 4
    assert [r.prompt_ids for r in first] != [r.prompt_ids for r in second]


def test_targets_are_written_and_used(tiny_flags, model_folder, tmp_path, capsys):
    flags = ["--lm", model_folder(), "--k", "[1,5]", "--per_k", "2", "--target_length", "4"]
    assert run("targets", *flags, "--out", "t.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert all(len(line["ranks"]) == len(line["probabilities"]) for line in lines)
    assert run("targets", *flags, "--out", "t.jsonl") == 2  # nothing is overwritten
    assert (
        run("targets", "--lm", model_folder(), "--targets_file", "t.jsonl", "--out", "u.jsonl") == 0
    )
    assert (tmp_path / "u.jsonl").read_bytes() == (tmp_path / "t.jsonl").read_bytes()
    use = ["--data.targets_file", "t.jsonl", "--model.steps", "2"]
    assert run("fit", *MODEL_FLAGS, *tiny_flags, *use) == 0
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert {tuple(line["ids"]) for line in lines} == {row.target_ids for row in rows}


def test_verify_holds_and_notices_a_lie(tiny_flags, tmp_path, capsys):
    assert run("fit", *MODEL_FLAGS, "--model.steps", "6", *tiny_flags) == 0
    folder = tmp_path / "lightning_logs" / "version_0"
    assert run("verify", folder) == 0
    results = folder / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    lines[1]["lcs"] = 0.99
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert run("verify", results) == 1
    assert f"{lines[1]['target_id']}: lcs is recorded as 0.99" in capsys.readouterr().out


def test_ctrl_c_saves_a_checkpoint_and_the_printed_command_resumes(tiny_flags, tmp_path):
    flags = [*MODEL_FLAGS, "--model.steps", "250", "--model.eval_every", "50", *tiny_flags]
    flags += ["--data.per_k", "4"]
    process = start(["fit", *flags], tmp_path)
    folder = tmp_path / "lightning_logs" / "version_0"
    wait_for_rows(process, folder, 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted" in {row.stop_reason for row in read_rows(folder)}
    printed = next(line for line in errors.splitlines() if "python -m dlmi fit" in line)
    resumed = start(printed.split()[3:], tmp_path)
    _, errors = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, errors
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
    assert run("fit", *flags) == 0
    assert outcome_in(folder) == outcome_in(tmp_path / "lightning_logs" / "version_1")


def test_max_steps_leaves_a_run_that_resumes(tiny_flags, tmp_path, capsys):
    flags = [*MODEL_FLAGS, "--model.steps", "10", *tiny_flags]
    assert run("fit", *flags, "--trainer.max_steps", "13") == 0
    folder = tmp_path / "lightning_logs" / "version_0"
    checkpoint = folder / "checkpoints" / "last.ckpt"
    assert str(checkpoint.relative_to(tmp_path)) in capsys.readouterr().err
    assert run("fit", *flags, "--ckpt_path", checkpoint) == 0
    assert "│ all │       4 │" in capsys.readouterr().out  # the table has the earlier rows too
    assert run("fit", *flags) == 0
    assert outcome_in(folder) == outcome_in(tmp_path / "lightning_logs" / "version_1")


def bad_inputs():
    """Name, arguments after `fit`, and what the line must say."""
    model = MODEL_FLAGS
    return {
        "unknown_key": ([*model, "--model.tao", "1"], ["tao", "--model.help"]),
        "unknown_data_key": ([*model, "--data.tao", "1"], ["--data.tao", "--help"]),
        "unknown_method": (["--model", "Nope"], ["Nope", "DLMI"]),
        "no_method": ([], ["--model", "quickstart.yaml"]),
        "no_config": (["--config", "nope.yaml"], ["nope.yaml"]),
        "wrong_type": ([*model, "--model.steps", "few"], ["steps", "few"]),
        "prompt_length": ([*model, "--model.prompt_length", "0"], ["prompt_length", "got 0"]),
        "steps": ([*model, "--model.steps", "0"], ["`model.steps`", "got 0"]),
        "eval_every": ([*model, "--model.eval_every", "0"], ["eval_every", "got 0"]),
        "num_samples": ([*model, "--model.num_samples", "0"], ["num_samples", "got 0"]),
        "tau0": ([*model, "--model.tau0", "0"], ["tau0", "positive", "got 0"]),
        "lr": ([*model, "--model.lr", "-1"], ["`model.lr`", "got -1"]),
        "phi_init": (
            [*model, "--model.temperature", "fixed", "--model.phi_init", "zero"],
            ["phi_init", "fixed"],
        ),
        "target_length": ([*model, "--data.target_length", "0"], ["target_length", "got 0"]),
        "batch_size": ([*model, "--data.batch_size", "0"], ["batch_size", "got 0"]),
        "per_k": ([*model, "--data.per_k", "0"], ["per_k", "got 0"]),
        "no_k": ([*model, "--data.k", "[]"], ["data.k"]),
        "k_beyond_vocabulary": ([*model, "--data.k", "[40]"], ["`k`", "1 to 31", "40"]),
        "too_long": ([*model, "--model.prompt_length", "61"], ["at most 64", "61 + 4"]),
        "missing_file": ([*model, "--data.targets_file", "no.jsonl"], ["targets_file", "no.jsonl"]),
        "empty_file": ([*model, "--data.targets_file", "empty.jsonl"], ["at least one target"]),
        "malformed_file": ([*model, "--data.targets_file", "bad.jsonl"], ["bad.jsonl, line 2"]),
        "id_outside": ([*model, "--data.targets_file", "ids.jsonl"], ["line 1", "0 to 31", "77"]),
        "binary_file": ([*model, "--data.targets_file", "binary.txt"], ["UTF-8"]),
        "empty_text": ([*model, "--data.texts", '["w1", " "]'], ["texts[1]", "at least one token"]),
        "no_texts": ([*model, "--data.texts", "[]"], ["data.texts"]),
        "twice": ([*model, "--data.targets_file", "twice.jsonl"], ["unique", "'a'"]),
        "file_and_texts": (
            [*model, "--data.texts", '["w1"]', "--data.targets_file", "x"],
            ["targets_file", "texts", "both"],
        ),
        "no_weights": ([*model, "--data.lm", "no_weights"], ["folder with weights", "no_weights"]),
        "no_folder": ([*model, "--data.lm", "./nowhere"], ["./nowhere", "does not exist"]),
        "no_gguf": ([*model, "--data.lm", "nowhere.gguf"], ["nowhere.gguf", "does not exist"]),
        "broken_gguf": ([*model, "--data.lm", "broken.gguf"], ["GGUF", "broken.gguf"]),
        "no_network": (
            [*model, "--data.lm", "some-org/some-model"],
            ["some-org/some-model", "--data.lm smollm2-135m-instruct"],
        ),
        "encoder": ([*model, "--data.lm", "BERT"], ["causal", "BertForMaskedLM"]),
        "bos": ([*model, "--data.bos", "nonsense"], ["`bos`", "nonsense"]),
        "no_checkpoint": ([*model, "--ckpt_path", "no.ckpt"], ["ckpt_path", "no.ckpt"]),
        "read_only": (
            [*model, "--trainer.logger.init_args.save_dir", "a_file"],
            ["run folder", "a_file"],
        ),
        "clip": ([*model, "--trainer.gradient_clip_val", "1"], ["gradient_clip_val"]),
        "accumulate": ([*model, "--trainer.accumulate_grad_batches", "2"], ["accumulate"]),
        "half_z": ([*model, "--trainer.precision", "bf16-true"], ["precision", "data.dtype"]),
        "double_z": ([*model, "--trainer.precision", "64-true"], ["precision", "data.dtype"]),
        "engine": (
            [*model, "--trainer.precision", "transformer-engine"],
            ["trainer.precision", "bf16-mixed", "transformer-engine"],
        ),
        "odd_precision": (
            [*model, "--trainer.precision", "8-odd"],
            ["`trainer.precision`", "bf16-mixed", "got 8-odd"],
        ),
        "mixed_double": (
            [*model, "--trainer.precision", "bf16-mixed", "--data.dtype", "float64"],
            ["data.dtype", "bf16-mixed", "float64"],
        ),
        "no_such_map": (
            [*model, "--data.lm_device_map", "nonsense"],
            ["`data.lm_device_map`", "'sequential'", "got nonsense"],
        ),
        "no_such_device": (
            [*model, "--data.lm_device_map", '{"": "cuda:99"}'],
            ["data.lm_device_map", "'cuda:99'"],
        ),
        "no_such_bits": (
            [*model, "--data.quantization", "int3"],
            ["`data.quantization`", "'int8'", "got int3"],
        ),
        "mapped_ranks": (
            [*model, "--trainer.devices", "2", "--data.lm_device_map", "auto"],
            ["trainer.devices", "data.lm_device_map", "2 ranks"],
        ),
        "ranks": (
            [*model, "--trainer.devices", "2", "--trainer.strategy", "ddp"],
            ["`trainer.strategy`", "DDPStrategy", "Leave"],
        ),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_one_clear_line(name, tiny_flags, model_folder, tmp_path, capfd):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{"text"\n')
    (tmp_path / "ids.jsonl").write_text('{"ids": [1, 77]}\n')
    (tmp_path / "twice.jsonl").write_text('{"id": "a", "text": "w1"}\n' * 2)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or so it says")
    (tmp_path / "a_file").write_text("")
    (tmp_path / "no_weights").mkdir()
    shutil.copy(model_folder() / "config.json", tmp_path / "no_weights")
    flags, expected = bad_inputs()[name]
    flags = [str(model_folder("bert")) if flag == "BERT" else flag for flag in flags]
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run("fit", *tiny_flags, *flags) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("dlmi: error: "), lines
    assert all(part in lines[-1] for part in expected), lines[-1]
    assert len(lines) == 1 or "converting" in lines[0], lines
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "left something behind"


def test_a_checkpoint_of_other_settings_is_refused(tiny_flags, tmp_path, capfd):
    flags = [*MODEL_FLAGS, *tiny_flags]
    assert run("fit", *flags, "--model.steps", "10", "--trainer.max_steps", "3") == 0
    checkpoint = tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt"
    capfd.readouterr()
    for other in (["--model.steps", "11"], ["--model.steps", "10", "--data.target_seed", "1"]):
        assert run("fit", *flags, *other, "--ckpt_path", checkpoint) == 2
        line = capfd.readouterr().err.strip().splitlines()[-1]
        assert "ckpt_path" in line
        assert "config.yaml" in line


def test_a_second_run_into_the_same_folder_is_refused(tiny_flags, tmp_path, capfd):
    flags = [*MODEL_FLAGS, *tiny_flags, "--model.steps", "2"]
    flags += ["--trainer.logger.init_args.version", "mine"]
    assert run("fit", *flags) == 0
    before = (tmp_path / "lightning_logs/mine/results.jsonl").read_bytes()
    assert run("fit", *flags) == 2
    assert "mine" in capfd.readouterr().err.strip().splitlines()[-1]
    assert (tmp_path / "lightning_logs/mine/results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["frobnicate"], "frobnicate"),
        (["targets"], "out"),
        (["targets", "--out", "no/such/folder/t.jsonl"], "--out"),
        (["verify", "nowhere"], "nowhere"),
        (["verify", "empty.jsonl"], "empty"),
        (["verify", "bad.jsonl"], "line 1"),
    ],
)
def test_bad_input_of_the_other_commands(arguments, expected, tmp_path, capfd):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"lcs": 1}\n')
    assert run(*arguments) == 2
    assert expected in capfd.readouterr().err.strip().splitlines()[-1]


class RunsCode:
    """A pickle that makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("hit",)


def write_zip(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/b", "c")


OF_LIGHTNING = {"state_dict": {}, "pytorch-lightning_version": "2.6.0", "epoch": 1}
CHECKPOINTS = {
    "payload": (lambda file: torch.save({"inversion": RunsCode()}, file), "could run code"),
    "bare_payload": (lambda file: file.write_bytes(pickle.dumps(RunsCode())), "whole checkpoint"),
    "text": (lambda file: file.write_text("hello\n"), "whole checkpoint"),
    "empty": (lambda file: file.write_bytes(b""), "whole checkpoint"),
    "zip": (write_zip, "whole checkpoint"),
    "list": (lambda file: torch.save([1], file), "whole checkpoint"),
    "other_program": (lambda file: torch.save(OF_LIGHTNING, file), "another program"),
    "version": (
        lambda file: torch.save({**OF_LIGHTNING, "pytorch-lightning_version": "x"}, file),
        "another program",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused_and_runs_nothing(name, tiny_flags, tmp_path, capfd):
    make, expected = CHECKPOINTS[name]
    make(tmp_path / "x.ckpt")
    assert run("fit", *MODEL_FLAGS, *tiny_flags, "--ckpt_path", "x.ckpt") == 2
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("dlmi: error: Expected `ckpt_path`")
    assert expected in line
    assert os.listdir() == ["x.ckpt"], "ran, or left something behind"


def unfolding(levels="abcdefg"):
    """A few lines that stand for ten million values."""
    lines = [f"a: &a [{','.join(['x'] * 10)}]"]
    lines += [f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]" for a, b in itertools.pairwise(levels)]
    return "\n".join(lines)


HOSTILE_CONFIGS = {
    "cycle": ("model: DLMI\na: &a [*a]\n", "refers to itself"),
    "cycle_in_model": ("model: &a {class_path: DLMI, init_args: *a}\n", "refers to itself"),
    "depth": ("model: " + "[" * 100_000, "nested too deeply"),
    "unfolding": (unfolding(), "too many values"),
    "object": ("model: !!python/object/apply:os.mkdir [hit]\n", "python/object"),
    "binary": (b"\xff\xfe\x00", "UTF-8"),
    "null": ("model: {class_path: DLMI, init_args: {lr: null}}\n", "null"),
    "seed": ("model: DLMI\nseed_everything: -5\n", "-5"),
    "accelerator": ("model: DLMI\ntrainer: {accelerator: banana}\n", "banana"),
    "max_steps": ("model: DLMI\ntrainer: {max_steps: -7}\n", "max_steps"),
    "logger": ("model: DLMI\ntrainer: {logger: banana}\n", "`trainer.logger`"),
    "infinity": ("model: DLMI\ncheckpoint: {every_minutes: .inf}\n", "infinity"),
}


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_hostile_configs_are_one_clear_line(name, tmp_path, capfd):
    text, expected = HOSTILE_CONFIGS[name]
    (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert run("fit", "--config", "c.yaml", "--data.lm", "./nowhere") == 2
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("dlmi: error: ")
    assert expected in line
    assert os.listdir() == ["c.yaml"]


def test_anchors_in_a_config_still_work(tmp_path, capfd):
    (tmp_path / "c.yaml").write_text("data: {per_k: &n 2, batch_size: *n}\nmodel: DLMI\n")
    assert run("fit", "--config", "c.yaml", "--print_config") == 0
    assert "batch_size: 2" in capfd.readouterr().out


def test_errors_show_no_escape_codes(capfd):
    assert run("verify", "\x1b[31m\u202e") == 2
    error = capfd.readouterr().err
    assert "\\x1b[31m" in error
    assert not set(error) & {"\x1b", "\u202e"}


def test_verify_of_hostile_rows(tiny_flags, tmp_path, capfd):
    assert run("fit", *MODEL_FLAGS, "--model.steps", "2", *tiny_flags) == 0
    results = tmp_path / "lightning_logs" / "version_0" / "results.jsonl"
    row = json.loads(results.read_text().split("\n")[0])
    capfd.readouterr()

    def verify(**changes):
        results.write_text(json.dumps({**row, **changes}) + "\n")
        code = run("verify", results)
        said = "".join(capfd.readouterr())
        assert "\x1b" not in said
        return code, said

    assert verify(target_id="\x1b[31m", lcs=0.123)[0] == 1
    code, said = verify(dtype="load")
    assert code == 2
    assert "`dtype`" in said
    assert "positions" in verify(prompt_ids=[4] * 100)[1]


def test_what_the_system_refuses_is_one_clear_line(monkeypatch, capfd):
    def refused(arguments):
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setitem(COMMANDS, "report", refused)
    assert run("report") == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("dlmi: stopped: the system refused ([Errno 13] Permission denied")
