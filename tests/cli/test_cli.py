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
from helpers.command_line import CONFIGS, run
from helpers.subprocess_runs import ROOT, finish, outcome_in, start_and_pause

from dlmi import __version__, read_rows
from dlmi.cli.main import COMMANDS


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny_flags(model_folder):
    return [
        *("--data.lm", str(model_folder()), "--data.targets.k", "[1,3]"),
        *("--data.targets.per_k", "2", "--data.targets.length", "4"),
        *("--data.batch_size", "2", "--trainer.accelerator", "cpu"),
    ]


MODEL_FLAGS = [
    *("--model.method", "DLMI", "--model.method.num_samples", "2", "--model.prompt_length", "4")
]


def config_files():
    names = (path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
    # data/ is included by others; compare/ and gradients/ are for other commands.
    return sorted(
        name for name in names if not name.startswith(("data/", "compare/", "gradients/"))
    )


def test_help_names_every_command(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command}" in out for command in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_of_every_command(command, capsys):
    assert run(command, "--help") == 0
    assert f"usage: python -m dlmi {command}" in capsys.readouterr().out


def test_help_of_a_method_is_its_docstring(capsys):
    assert run("fit", "--model.method.help", "DLMI") == 0
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
def test_every_shipped_yaml_fits_for_two_steps(name, model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DLMI_CACHE", str(tmp_path / "cache"))  # for what `auto` measures
    monkeypatch.setattr("dlmi.run.norm_scale._STEPS", 2)
    base = [] if not name.startswith("parts/") else ["--config", CONFIGS / "dlmi_tau100.yaml"]
    flags = ["--data.lm", model_folder(), "--data.load.bos", "<bos>", "--data.dtype", "float32"]
    flags += ["--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    flags += ["--model.steps", "2", "--model.prompt_length", "6"]
    if name.startswith("prompt_engineering/"):  # 64 positions, and no chat template
        flags += ["--data.chat", "false", "--data.template", "{question} {slot} w1"]
        flags += ["--data.targets.source", "q.jsonl"]
        (tmp_path / "q.jsonl").write_text('{"question": "w1", "answer": " w2 #### w3"}\n' * 2)
    else:
        flags += ["--data.targets", "ByRank", "--data.targets.k", "[1,3]"]
        flags += ["--data.targets.per_k", "1", "--data.targets.length", "4"]
    if name in ("gcg.yaml", "mac.yaml", "templates/hint.yaml"):
        flags += ["--model.method.topk", "8", "--model.method.search_width", "8"]
    assert run("fit", *base, "--config", CONFIGS / name, *flags) == 0
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert len(rows) == (1 if name.startswith("prompt_engineering/") else 2)
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


def test_default_root_dir_is_where_a_run_goes(tiny_flags, tmp_path):
    flags = [*MODEL_FLAGS, *tiny_flags, "--model.steps", "2", "--trainer.default_root_dir", "there"]
    assert run("fit", *flags) == 0
    assert len(read_rows(tmp_path / "there" / "lightning_logs" / "version_0")) == 4
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", "else") == 0
    assert len(read_rows(tmp_path / "else" / "lightning_logs" / "version_0")) == 4
    assert sorted(os.listdir(tmp_path)) == ["else", "there"]


def test_settings_within_settings(tiny_flags, tmp_path):
    flags = ["--model.method", "Refined", "--model.method.first", "DLMI", "--model.steps", "2"]
    flags += ["--model.method.first.tau0", "2", "--model.method.search.width", "3"]
    flags += ["--data.targets", "Texts", "--data.targets.texts", '["w1 w2"]']
    assert run("fit", *tiny_flags, *flags, "--model.prompt_length", "3") == 0
    [row] = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert (row.target_text, row.method) == ("w1 w2", "Refined")
    assert row.settings["first"]["tau0"] == 2.0
    assert row.settings["search"]["width"] == 3


def test_targets_are_written_and_used(tiny_flags, model_folder, tmp_path, capsys):
    flags = ["--lm", model_folder(), "--k", "[1,5]", "--per_k", "2", "--length", "4"]
    assert run("targets", *flags, "--out", "t.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert all(len(line["ranks"]) == len(line["probabilities"]) for line in lines)
    assert run("targets", *flags, "--out", "t.jsonl") == 2  # nothing is overwritten
    assert run("targets", "--lm", model_folder(), "--file", "t.jsonl", "--out", "u.jsonl") == 0
    assert (tmp_path / "u.jsonl").read_bytes() == (tmp_path / "t.jsonl").read_bytes()
    use = ["--data.targets", "File", "--data.targets.path", "t.jsonl", "--model.steps", "2"]
    assert run("fit", *MODEL_FLAGS, *tiny_flags, *use) == 0
    rows = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert {tuple(line["ids"]) for line in lines} == {row.target_ids for row in rows}


def test_verify_holds_and_notices_a_lie(tiny_flags, tmp_path, capsys):
    assert run("fit", *MODEL_FLAGS, "--model.steps", "6", *tiny_flags) == 0
    folder = tmp_path / "lightning_logs" / "version_0"
    assert run("verify", folder) == 0
    assert "4 prompts decoded again, one at a time\n" in capsys.readouterr().out
    results = folder / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    lines[1]["lcs"] = 0.99
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert run("verify", results) == 1
    assert f"{lines[1]['target_id']}: lcs is recorded as 0.99" in capsys.readouterr().out


def test_ctrl_c_saves_a_checkpoint_and_the_printed_command_resumes(tiny_flags, tmp_path):
    flags = [*MODEL_FLAGS, "--model.steps", "30", "--model.eval_every", "10", *tiny_flags]
    process, go_on = start_and_pause(["fit", *flags], tmp_path, step=35)
    process.send_signal(signal.SIGINT)
    go_on()
    _, errors = finish(process, exit_code=130)
    folder = tmp_path / "lightning_logs" / "version_0"
    assert "interrupted" in {row.stop_reason for row in read_rows(folder)}
    printed = next(line for line in errors.splitlines() if "python -m dlmi fit" in line)
    assert run(*printed.split()[3:]) == 0
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
    model, method = MODEL_FLAGS, "--model.method"
    file = [*model, "--data.targets", "File", "--data.targets.path"]
    texts = [*model, "--data.targets", "Texts", "--data.targets.texts"]
    return {
        "unknown_key": (
            [*model, f"{method}.tau", "1"],
            [
                "`model.method.tau`",
                "Did you mean `model.method.tau0` of DLMI?",
                "--model.method.help",
            ],
        ),
        "unknown_data_key": (
            [*model, "--data.btch_size", "1"],
            ["`data.btch_size`", "Did you mean `data.batch_size`?", "--help"],
        ),
        "abbreviated": (
            [*model, "--trainer.max_step", "4"],
            ["`trainer.max_step`", "Did you mean `trainer.max_steps`?"],
        ),
        "misspelt_logger": (
            [*model, "--trainer.logger", "CSVLoger"],
            ["`trainer.logger`", "got CSVLoger", "Did you mean CSVLogger?"],
        ),
        "no_such_accelerator": (
            [*model, "--trainer.accelerator", "tpu"],
            ["`trainer.accelerator` tpu", "Use `--trainer.accelerator cpu` or `auto`."],
        ),
        "no_tokenizer": (
            [*model, "--data.lm", "./no_tokenizer"],
            ["Expected `data.lm` to come with a tokenizer", "from one of: (1)"],
        ),
        "inline_yaml": (
            [*model, "--config", "a: [1"],
            ["Expected `config` to be valid YAML, but line 1: expected ',' or ']'"],
        ),
        "unknown_method": ([method, "Nope"], ["`model.method`", "got Nope", "one of ADC, ARCA"]),
        "unknown_first": (
            [method, "Refined", f"{method}.first", "Nope"],
            ["`model.method.first`", "got Nope", "one of ADC, ARCA"],
        ),
        "unknown_source": ([*model, "--data.targets", "Nope"], ["`data.targets`", "ByRank, File"]),
        "no_method": ([], ["`model.method`", "one of ADC, ARCA"]),
        "no_config": (["--config", "nope.yaml"], ["nope.yaml"]),
        "wrong_type": (
            [*model, "--model.steps", "few"],
            ["Expected `model.steps` to be a whole number, but got few."],
        ),
        "wrong_type_of_method": (
            [*model, f"{method}.lr", "few"],
            ["Expected `model.method.lr` to be a number, but got few."],
        ),
        "wrong_choice": (
            [*model, "--data.targets.eos", "cut"],
            ["Expected `data.targets.eos` to be 'pad' or 'strip', but got cut."],
        ),
        "wrong_k": (
            [*model, "--data.targets.k", "3"],
            ["Expected `data.targets.k` to be a list, but got 3."],
        ),
        "prompt_length": ([*model, "--model.prompt_length", "0"], ["prompt_length", "got 0"]),
        "steps": ([*model, "--model.steps", "0"], ["`model.steps`", "got 0"]),
        "eval_every": ([*model, "--model.eval_every", "0"], ["eval_every", "got 0"]),
        "num_samples": ([*model, f"{method}.num_samples", "0"], ["num_samples", "got 0"]),
        "tau0": ([*model, f"{method}.tau0", "0"], ["`model.method.tau0`", "positive", "got 0"]),
        "lr": ([*model, f"{method}.lr", "-1"], ["`model.method.lr`", "got -1"]),
        "target_length": (
            [*model, "--data.targets.length", "0"],
            ["`data.targets.length`", "got 0"],
        ),
        "batch_size": ([*model, "--data.batch_size", "0"], ["batch_size", "got 0"]),
        "per_k": ([*model, "--data.targets.per_k", "0"], ["per_k", "got 0"]),
        "no_k": ([*model, "--data.targets.k", "[]"], ["data.targets.k"]),
        "k_beyond_vocabulary": (
            [*model, "--data.targets.k", "[40]"],
            ["`data.targets.k`", "1 to 31", "40"],
        ),
        "too_long": ([*model, "--model.prompt_length", "61"], ["at most 64", "61 + 4"]),
        "small_budget": ([*model, "--model.token_budget", "5"], ["`model.token_budget`", "got 5"]),
        "missing_file": ([*file, "no.jsonl"], ["`data.targets.path`", "no.jsonl"]),
        "empty_file": ([*file, "empty.jsonl"], ["at least one target"]),
        "malformed_file": ([*file, "bad.jsonl"], ["bad.jsonl, line 2"]),
        "id_outside": ([*file, "ids.jsonl"], ["line 1", "0 to 31", "77"]),
        "binary_file": ([*file, "binary.txt"], ["UTF-8"]),
        "twice": ([*file, "twice.jsonl"], ["unique", "'a'"]),
        "empty_text": ([*texts, '["w1", " "]'], ["texts[1]", "at least one token"]),
        "no_texts": ([*texts, "[]"], ["data.targets.texts"]),
        "file_and_texts": ([*texts, '["w1"]', "--data.targets.path", "x"], ["targets.path"]),
        "no_weights": ([*model, "--data.lm", "no_weights"], ["folder with weights", "no_weights"]),
        "no_folder": ([*model, "--data.lm", "./nowhere"], ["./nowhere", "does not exist"]),
        "no_gguf": ([*model, "--data.lm", "nowhere.gguf"], ["nowhere.gguf", "does not exist"]),
        "broken_gguf": ([*model, "--data.lm", "broken.gguf"], ["GGUF", "broken.gguf"]),
        "no_network": (
            [*model, "--data.lm", "some-org/some-model"],
            ["some-org/some-model", "--data.lm smollm2-135m-instruct"],
        ),
        "encoder": ([*model, "--data.lm", "BERT"], ["causal", "BertForMaskedLM"]),
        "bos": ([*model, "--data.load.bos", "nonsense"], ["bos", "nonsense"]),
        "no_checkpoint": ([*model, "--ckpt_path", "no.ckpt"], ["ckpt_path", "no.ckpt"]),
        "read_only": (
            [*model, "--trainer.logger.init_args.save_dir", "a_file"],
            ["a folder that can be written", "a_file"],
        ),
        "root_is_a_file": ([*model, "--trainer.default_root_dir", "a_file"], ["can be written"]),
        "clip": ([*model, "--trainer.gradient_clip_val", "1"], ["gradient_clip_val"]),
        "accumulate": ([*model, "--trainer.accumulate_grad_batches", "2"], ["accumulate"]),
        "half_z": ([*model, "--trainer.precision", "bf16-true"], ["precision", "data.dtype"]),
        "odd_precision": (
            [*model, "--trainer.precision", "8-odd"],
            ["`trainer.precision`", "bf16-mixed", "got 8-odd"],
        ),
        "mixed_double": (
            [*model, "--trainer.precision", "bf16-mixed", "--data.dtype", "float64"],
            ["data.dtype", "bf16-mixed", "float64"],
        ),
        "no_such_map": (
            [*model, "--data.load.device_map", "nonsense"],
            ["`data.load.device_map`", "'sequential' or a mapping", "got nonsense"],
        ),
        "no_such_device": (
            [*model, "--data.load.device_map", '{"": "cuda:99"}'],
            ["device_map", "'cuda:99'"],
        ),
        "no_such_bits": (
            [*model, "--data.load.quantization", "int3"],
            ["`data.load.quantization`", "'int8' or 'int4'", "got int3"],
        ),
        "mapped_workers": (
            [*model, "--trainer.devices", "2", "--data.load.device_map", "auto"],
            ["trainer.devices", "data.load.device_map", "2 workers"],
        ),
        "workers": (
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
    (tmp_path / "no_tokenizer").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(model_folder() / file, tmp_path / "no_tokenizer")
    flags = [str(model_folder("bert")) if flag == "BERT" else flag for flag in flags]
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run("fit", *tiny_flags, *flags) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("dlmi: error: "), lines
    assert all(part in lines[-1] for part in expected), lines[-1]
    assert len(lines) == 1 or "converting" in lines[0], lines
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "left something behind"


# Settings by their former names, and what the line must say they are now.
FORMER = {
    "--model DLMI": "`model.method`",
    "--model EchoSearch": "`model.method`",
    "--model.method EchoSearch": "`SwapSearch`",
    "--model.method DLMI --model.tau0 1": "`model.method.tau0`",
    "--model.method DLMI --model.init_args.tau0 1": "`model.method.tau0`",
    "--model.method DLMI --model.init_args.steps 1": "`model.steps`",
    "--model.method DLMI --model.refine_after 0.5": "`model.method Refined",
    "--model.method DLMI --model.method.refine_after 0.5": "`model.method Refined",
    "--model.method GCG --model.allow_non_ascii true": "`model.allowed_tokens all`",
    "--model.method GCG --model.method.init random": "`model.method.first_prompt`",
    "--model.method DLMI --data.k [1]": "`data.targets.k`",
    "--model.method DLMI --data.per_k 1": "`data.targets.per_k`",
    "--model.method DLMI --data.target_length 4": "`data.targets.length`",
    "--model.method DLMI --data.target_seed 4": "`data.targets.seed`",
    "--model.method DLMI --data.targets_file x": "`data.targets File, with data.targets.path`",
    "--model.method DLMI --data.texts [x]": "`data.targets.texts` of Texts",
    "--model.method DLMI --data.bos x": "`data.load.bos`",
    "--model.method DLMI --data.quantization int8": "`data.load.quantization`",
    "--model.method DLMI --data.lm_device_map auto": "`data.load.device_map`",
    "--model.method DLMI --data.trust_remote_code true": "`data.load.trust_remote_code`",
    "--model.method DLMI --data.shared true": "`data.share",
    "--model.method DLMI --data.questions sums": "`data.targets Questions",
    "--config {model: DLMI}": "`model.method`",
    "--config {model: {class_path: DLMI}}": "`model.method`",
    "--config {model: {class_path: DLMI, init_args: {tau0: 1}}}": "`model.method.tau0`",
    "--config {model: {init_args: {tau0: 1}}}": "`model.method.tau0`",
    "--model.method DLMI --config {data: {k: [1], per_k: 2}}": "`data.targets.k`",
}


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_is_refused_with_the_present_one(former, capfd):
    words = former.partition("--config ")
    flags = [*words[0].split(), *([words[1].strip(), words[2]] if words[1] else [])]
    assert run("fit", *flags) == 2
    [line] = capfd.readouterr().err.strip().splitlines()
    assert FORMER[former] in line.split(" but got ")[1].partition(".")[2]


def test_a_checkpoint_of_other_settings_is_refused(tiny_flags, tmp_path, capfd):
    flags = [*MODEL_FLAGS, *tiny_flags]
    assert run("fit", *flags, "--model.steps", "10", "--trainer.max_steps", "3") == 0
    checkpoint = tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt"
    capfd.readouterr()
    for other in (["--model.steps", "11"], ["--model.steps", "10", "--data.targets.seed", "1"]):
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
        (["targets", "--out", "t.jsonl", "--target_length", "3"], "Did you mean `length`?"),
        (["targets", "--out", "t.jsonl", "--texts", "[a]", "--file", "b"], "but got both"),
        (["targets", "--out", "t.jsonl", "--per_kk", "3"], "Did you mean `per_k`?"),
        (["verify", "nowhere", "--bos", "x"], "Did you mean `load.bos`"),
        (["verify", "nowhere"], "nowhere"),
        (["verify", "nowhere", "--load.quantization", "int8"], "`load.quantization`"),
        (["targets", "--out", "/proc/t.jsonl"], "--out"),
        (["report", ".", "--out", "/proc/report"], "Expected `--out` to be a folder"),
        (["invert", "x", "--second", "3"], "Did you mean `seconds`?"),
        (["bench", "--lm", "./nowhere", "--out", "b.json"], "Expected `lm`"),
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


DLMI = "model: {method: DLMI}\n"
HOSTILE_CONFIGS = {
    "cycle": (f"{DLMI}a: &a [*a]\n", "refers to itself"),
    "cycle_in_model": ("model: {method: &a {class_path: DLMI, init_args: *a}}\n", "to itself"),
    "depth": ("model: " + "[" * 100_000, "nested too deeply"),
    "unfolding": (unfolding(), "more than 20 aliases"),
    "object": ("model: !!python/object/apply:os.mkdir [hit]\n", "python/object"),
    "binary": (b"\xff\xfe\x00", "c.yaml to be UTF-8"),
    "no_yaml": ("model: [\n", "Expected c.yaml to be valid YAML, but line 2: expected"),
    "null_section": (f"{DLMI}data: {{load: null}}\n", "`data.load` to be a mapping, but got null"),
    "no_package": (f"{DLMI}trainer: {{logger: CometLogger}}\n", "pip install"),
    "null": (
        "model: {method: {class_path: DLMI, init_args: {lr: null}}}\n",
        "Expected `model.method.lr` to be a number, but got null",
    ),
    "null_load": (f"{DLMI}data: {{load: {{trust_remote_code: null}}}}\n", "`data.load.trust_"),
    "seed": (f"{DLMI}seed_everything: -5\n", "-5"),
    "accelerator": (f"{DLMI}trainer: {{accelerator: banana}}\n", "banana"),
    "max_steps": (f"{DLMI}trainer: {{max_steps: -7}}\n", "max_steps"),
    "logger": (f"{DLMI}trainer: {{logger: banana}}\n", "`trainer.logger`"),
    "infinity": (f"{DLMI}checkpoint: {{every_minutes: .inf}}\n", "infinity"),
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
    (tmp_path / "c.yaml").write_text(f"data: {{rows_per_pass: &n 2, batch_size: *n}}\n{DLMI}")
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
    def refused(name, arguments):
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr("dlmi.cli.main._run", refused)
    assert run("report") == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("dlmi: stopped: the system refused ([Errno 13] Permission denied")
