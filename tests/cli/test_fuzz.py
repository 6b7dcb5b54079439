"""Files that others wrote, broken in every way that comes to mind: one clear line, or success.

`FUZZ_EXAMPLES=100 pytest tests/cli/test_fuzz.py` multiplies the number of examples by 100.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import string
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer

from dlmi import InputError, Inverter, TargetDataModule, read_rows
from dlmi.cli.main import main
from dlmi.cli.report import write_report
from dlmi.gradient_rows import GradientRow, read_gradient_rows
from dlmi.methods import DLMI
from dlmi.report.gradient_sets import gradient_sets, ks_table
from dlmi.report.loading import load
from dlmi.report.page import write_page
from dlmi.report.tables import (
    group_table,
    lcs_matrix_table,
    overlap_table,
    prompt_table,
    round_trip_table,
    settings_tables,
    summary_table,
)
from dlmi.report.writing import write_tables
from dlmi.rows import Inversion
from dlmi.targets.files import read_targets, write_targets
from dlmi.targets.sources import ByRank

CONFIGS = Path(__file__).parents[2] / "configs"
FACTOR = int(os.environ.get("FUZZ_EXAMPLES", "1"))


def examples(count):
    """So many of them, the same ones every time."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ---- What files may hold

# Separators of lines to some, markup of terminals and pages, and what no file can hold.
ODD = "\x00\x0b\x0c\x1b\x1c\x85\u2028\u2029\u202e\ufeff\ud800[]/<>&$\\{}%_=@'\"\r\n\t"
texts = st.text(st.one_of(st.sampled_from(ODD), st.characters()), max_size=12)
numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, -(2**63), 10**400, -(10**30), math.nan, math.inf, -math.inf]),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
deep = st.sampled_from(["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 50_000, "9" * 10_000])
broken_lines = st.one_of(
    st.binary(max_size=60),
    deep.map(str.encode),
    values.map(lambda value: json.dumps(value).encode()),
)


def mutated(valid, path=()):
    """A JSON value with one of its parts, at any depth, replaced, left out or added."""
    places = list(_places(valid))

    def change(drawn):
        place, how, value = drawn
        made = json.loads(json.dumps(valid))
        holder = made
        for step in place[:-1]:
            holder = holder[step]
        if how == "remove":
            del holder[place[-1]]
        elif how == "add" and isinstance(holder, dict):
            holder[str(value)[:8]] = value
        elif how == "double" and isinstance(holder, list):
            holder.append(holder[place[-1]])
        else:
            holder[place[-1]] = value
        return made

    hows = st.sampled_from(["replace", "replace", "replace", "remove", "add", "double"])
    return st.tuples(st.sampled_from(places), hows, values).map(change)


def _places(value, path=()):
    """Paths to the parts of a value; of a long list only to its first ones."""
    keys = value if isinstance(value, dict) else range(min(3, len(value)))
    for key in keys:
        yield (*path, key)
        if isinstance(value[key], dict | list):
            yield from _places(value[key], (*path, key))


def as_line(value):
    return json.dumps(value).encode() + b"\n"


@contextlib.contextmanager
def scratch():
    """A folder for one example; hypothesis runs many within one test."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextlib.contextmanager
def one_clear_line():
    """Let through what says where the mistake is, and nothing else."""
    with contextlib.suppress(InputError):
        yield


def run(*arguments):
    """Run a command in an empty folder of its own, where it may not leave anything behind.

    Gives its exit code and what it said on stderr.
    """
    said, before = io.StringIO(), Path.cwd()
    with scratch() as folder:
        try:
            os.chdir(folder)
            with (
                contextlib.redirect_stderr(said),
                contextlib.redirect_stdout(io.StringIO()),
                pytest.raises(SystemExit) as stop,
            ):
                main([str(argument) for argument in arguments])
            assert not list(folder.iterdir())
        finally:
            os.chdir(before)
    code, error = stop.value.code or 0, said.getvalue()
    assert code in (0, 1, 2)
    assert (code == 2) == (error.count("dlmi: error: ") == 1), error
    assert "Traceback" not in error
    assert not set(error) & set("\x1b\u202e\x00")
    return code, error


# ---- Targets


@examples(120)
@given(
    lines=st.lists(
        st.one_of(
            broken_lines,
            st.fixed_dictionaries(
                {},
                optional={
                    "id": st.one_of(texts, values),
                    "ids": st.one_of(st.lists(st.integers(0, 31), max_size=5), values),
                    "text": st.one_of(st.just("w1 w2"), texts, values),
                    "k": st.one_of(st.integers(1, 5), values),
                    "ranks": values,
                    "perplexity": values,
                },
            ).map(lambda value: json.dumps(value, ensure_ascii=True).encode()),
        ),
        max_size=4,
    ),
    suffix=st.sampled_from(["jsonl", "txt"]),
    newline=st.sampled_from([b"\n", b"\r\n"]),
)
def test_target_files(tiny, lines, suffix, newline):
    with scratch() as folder, one_clear_line():
        file = folder / f"targets.{suffix}"
        file.write_bytes(newline.join(lines))
        targets = read_targets(tiny, file)
        write_targets(folder / "again.jsonl", targets)
        again = read_targets(tiny, folder / "again.jsonl")
        assert str(again) == str(targets)  # as text: NaN is not itself


def test_target_files_through_the_command(model_folder):
    for content in (b"\xff\xfe", b"[" * 100_000, b'{"text": "\\ud800"}', b'{"ids": [1], "k": 1e9}'):
        with scratch() as folder:
            (folder / "t.jsonl").write_bytes(content)
            flags = ["--model.method", "DLMI", "--data.lm", model_folder()]
            flags += ["--data.targets", "File", "--data.targets.path", folder / "t.jsonl"]
            code, error = run("fit", *flags, "--trainer.accelerator", "cpu")
            assert code == 2
            assert "t.jsonl, line 1" in error


# ---- Results


@pytest.fixture(scope="module")
def row(model_folder, tmp_path_factory):
    """One real row, as JSON."""
    data = TargetDataModule(lm=str(model_folder()), targets=ByRank(k=(2,), per_k=1, length=3))
    model = Inverter(DLMI(num_samples=1), prompt_length=3, steps=4, eval_every=2)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    root = tmp_path_factory.mktemp("run")
    trainer = Trainer(
        max_epochs=-1, accelerator="cpu", default_root_dir=root, enable_model_summary=False, **quiet
    )
    trainer.fit(model, datamodule=data)
    return json.loads(model.finished[0].to_json_line())


@examples(8)
@given(data=st.data())
def test_odd_characters_survive_the_results_file(row, data):
    odd = texts.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
    names = ["target_id", "target_text", "prompt_text", "output_text", "model"]
    made = Inversion.from_json({**row, **{name: data.draw(odd) for name in names}})
    with scratch() as folder:
        file = folder / "results.jsonl"
        file.write_text(made.to_json_line() * 2, encoding="utf-8")
        assert read_rows(file) == [made, made]
        [group] = load([folder]).groups
        assert group.rows == [made]


@examples(120)
@given(data=st.data())
def test_results_and_their_report(row, data):
    """All of a report but its pictures, which take seconds to draw."""
    rows = [row, *data.draw(st.lists(mutated(row), min_size=1, max_size=3))]
    extra = data.draw(st.lists(broken_lines, max_size=1))
    with scratch() as folder:
        file = folder / "runs" / "results.jsonl"
        file.parent.mkdir()
        file.write_bytes(b"".join(map(as_line, rows)) + b"\n".join(extra))
        if data.draw(st.booleans()):
            cell = {"label": "A", "axis": "step", "budgets": [2, 4]}
            (file.parent / "cell.json").write_bytes(as_line(data.draw(mutated(cell))))
        with one_clear_line():
            assert len(read_rows(file, tolerate_cut=True)) <= len(rows)
        loaded = load([folder])
        tables = [make(loaded) for make in (group_table, summary_table, lcs_matrix_table)]
        tables += [make(loaded) for make in (overlap_table, round_trip_table, prompt_table)]
        tables += settings_tables(loaded)
        write_tables(folder / "tables", tables)
        write_page(folder / "page.html", loaded, [], tables)
        assert "\x1b" not in (folder / "page.html").read_text(encoding="utf-8")


@examples(2)
@given(data=st.data())
def test_whole_reports(row, data):
    rows = [data.draw(mutated(row)) for _ in range(3)]
    with scratch() as folder, one_clear_line():
        (folder / "results.jsonl").write_bytes(b"".join(map(as_line, rows)))
        write_report([folder], folder / "out")


@examples(25)
@given(data=st.data())
def test_verify(row, data, model_folder):
    """The model stays the tiny one: a fuzzed name must not be looked for on the hub."""
    other = {**data.draw(mutated(row)), "model": row["model"]}
    elsewhere = data.draw(st.sampled_from([[], ["--lm", model_folder()]]))
    with scratch() as folder:
        file = folder / "results.jsonl"
        file.write_bytes(as_line(row) + as_line(other))
        before = file.read_bytes()
        run("verify", file, *elsewhere)
        assert file.read_bytes() == before


# ---- Checkpoints


@pytest.fixture(scope="module")
def checkpoint(model_folder, tmp_path_factory):
    """The flags of a run, and its checkpoint after two of four steps."""
    flags = ["--model.method", "DLMI", "--model.prompt_length", 3, "--model.steps", 4]
    flags += ["--data.lm", model_folder(), "--data.targets", "Texts"]
    flags += ["--data.targets.texts", "[w1 w2]", "--trainer.accelerator", "cpu"]
    root = tmp_path_factory.mktemp("checkpoint")
    stop = ["--trainer.max_steps", 2, "--trainer.default_root_dir", root]
    code, _ = run("fit", *flags, *stop)
    assert code == 0
    [file] = root.rglob("last.ckpt")
    return flags, file.read_bytes()


@examples(6)
@given(data=st.data())
def test_checkpoints(checkpoint, data):
    """Cut short, or with a part that is missing or of another type."""
    flags, whole = checkpoint
    with scratch() as folder:
        file = folder / "last.ckpt"
        if data.draw(st.booleans()):
            file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 100))])
        else:
            content = torch.load(io.BytesIO(whole), weights_only=True)
            holder = data.draw(st.sampled_from([content, content["inversion"]]))
            names = {"epoch", "global_step", "loops", "state_dict", "inversion"}
            names |= {"identity", "slots", "finished_ids"}
            name = data.draw(st.sampled_from(sorted(names & holder.keys())))
            del holder[name]
            if data.draw(st.booleans()):
                holder[name] = data.draw(st.sampled_from([None, "text", 0.5]))
            torch.save(content, file)
        code, error = run("fit", *flags, "--ckpt_path", file)
        assert code == 2
        assert "`ckpt_path`" in error


# ---- Gradients


@pytest.fixture(scope="module")
def gradient_row(row):
    """A gradient row, as JSON; the columns that it shares with a result row are that row's."""
    known = {
        "estimator": "gumbel_softmax",
        "trajectory": "own",
        "step": 0,
        "prompt_length": 3,
        "target_length": 3,
        "num_samples": 1,
        "draws": 8,
        "tau": 1.0,
        "truth": {"kind": "enumerated", "samples": 9, "blocks": 1, "norm": 1.0},
        "loss": "cross_entropy",
        "teacher_forcing": False,
    }
    statistic = {"value": 0.5, "low": 0.25, "high": None}
    names = [field.name for field in dataclasses.fields(GradientRow)]
    return {name: known.get(name, row.get(name, statistic)) for name in names}


@examples(60)
@given(data=st.data())
def test_gradient_files(gradient_row, data):
    lines = [data.draw(st.one_of(mutated(gradient_row).map(as_line), broken_lines))]
    with scratch() as folder:
        file = folder / "gradients.jsonl"
        file.write_bytes(as_line(gradient_row) + b"\n".join(lines))
        rows, _ = read_gradient_rows(file)
        assert rows
        ks_table(gradient_sets([rows]))


# ---- Configurations

FIT_CONFIGS = ["dlmi_tau100.yaml", "gcg.yaml", "quickstart.yaml"]
FRAGMENTS = [
    *("\t", "\x00", "&a [*a]", "*nothing", "!!python/object/apply:os.system ['touch pwned']"),
    *("[" * 100_000, "? [a]\n: b", "--- a\n--- b", "\ufeff", "{", "]", "model:\n", "<<: 3\n"),
]


def config_text(name):
    """A shipped file with one thing changed: a value, or its very text."""
    text = (CONFIGS / name).read_text()
    plain = yaml.safe_load(text)
    nonsense = st.sampled_from(["os.system", "DLMI", "dlmi.Nope", "lightning.Trainer", "", "1e999"])

    def insert(drawn):
        place, fragment = drawn
        return text[:place] + fragment + text[place:]

    words = st.text(string.printable, max_size=6)
    swapped = st.tuples(st.sampled_from(list(_places(plain))), st.one_of(values, nonsense, words))

    def swap(drawn):
        place, value = drawn
        made = yaml.safe_load(text)
        holder = made
        for step in place[:-1]:
            holder = holder[step]
        holder[place[-1]] = value
        return yaml.safe_dump(made)

    inserted = st.tuples(st.integers(0, len(text)), st.sampled_from(FRAGMENTS)).map(insert)
    return st.one_of(swapped.map(swap), swapped.map(swap), inserted)


def write_config(folder, text):
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return file


@examples(12)
@given(data=st.data())
def test_fit_configs(data):
    name = data.draw(st.sampled_from(FIT_CONFIGS))
    with scratch() as folder:
        file = write_config(folder, data.draw(config_text(name)))
        # The folder of the LM does not exist, so that nothing runs, whatever the file says.
        code, _ = run("fit", "--config", file, "--data.lm", folder / "nowhere")
        assert code == 2


def test_shipped_configs_get_as_far_as_the_model():
    """What is changed below is sound before: the model's name is all that is refused."""
    with scratch() as folder:
        nowhere = ["--data.lm", folder / "nowhere"]
        for flags in (
            *(["fit", "--config", CONFIGS / name] for name in FIT_CONFIGS),
            ["gradients", "--config", CONFIGS / "gradients/small.yaml", "--out", folder / "out"],
        ):
            code, error = run(*flags, *nowhere)
            assert code == 2
            assert str(folder / "nowhere") in error


@examples(4)
@given(data=st.data())
def test_compare_configs(data):
    with scratch() as folder:
        text = data.draw(config_text("compare/small.yaml"))
        file = write_config(folder, text.replace("../", f"{CONFIGS}/"))
        code, _ = run("compare", "--config", file, "--dry_run", "--out", folder / "out")
        assert code in (0, 2)


@examples(10)
@given(data=st.data())
def test_gradient_configs(data):
    with scratch() as folder:
        file = write_config(folder, data.draw(config_text("gradients/small.yaml")))
        flags = ["--data.lm", folder / "nowhere", "--out", folder / "out"]
        code, _ = run("gradients", "--config", file, *flags)
        assert code == 2
        assert not (folder / "out").exists()
