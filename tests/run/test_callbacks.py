"""What a run stores and shows, and that watching it changes nothing."""

import io
import signal
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from dlmi import Inverter, read_rows
from dlmi.methods import DLMI, Refined, SwapSearch
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.run.callbacks.metrics import TensorBoardDetails
from dlmi.run.callbacks.progress import InversionProgress, marked_output, summary_table
from dlmi.run.callbacks.results import ResultWriter
from dlmi.targets.sources import Questions
from dlmi.text import clock, escape_markdown, visible


def small(method=None):
    return Inverter(method or DLMI(tau0=1.0, num_samples=2), 4, steps=8, eval_every=4)


@pytest.fixture
def logged_run(data, fit, tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    callbacks = [ResultWriter(), TensorBoardDetails(), InversionProgress()]
    options = {"logger": logger, "callbacks": callbacks, "log_every_n_steps": 2}
    rows = fit(small(), data(), enable_progress_bar=True, **options)
    return rows, logger


def test_callbacks_do_not_change_a_result(logged_run, data, fit):
    bare = fit(small(), data())
    rows, logger = logged_run
    assert {r.target_id: r.prompt_ids for r in read_rows(Path(logger.log_dir))} == {
        target_id: row.prompt_ids for target_id, row in bare.items()
    }
    assert len(rows) == 4


def test_tensorboard_has_every_curve(logged_run):
    events = EventAccumulator(logged_run[1].log_dir).Reload()
    tags = events.Tags()
    scalars = set(tags["scalars"])
    assert scalars >= {
        "train/loss",
        "train/grad_norm_Z",
        "train/grad_norm_Phi",
        "eval/lcs",
        "eval/best_lcs",
        "eval/as_in_code_lcs",
        "eval/discrete_loss",
        "eval/soft_to_hard_gap",
        "eval/tau",
        "eval/entropy",
        "eval/token_passes",
        "cost/best_lcs",
        "finished/mean_lcs",
        "finished/exact",
        "finished/exact_rate",
        "final/mean_lcs",
        "final/exact_rate",
    }
    assert set(tags["histograms"]) == {
        f"per_position_{name}/{target_id}"
        for name in ("tau", "entropy")
        for target_id in logged_run[0]
    }
    assert "epoch" not in scalars
    assert {tag for tag in scalars if tag.startswith("targets/")} == {
        f"targets/{target_id}" for target_id in logged_run[0]
    }
    assert "custom_scalars__config__" in tags["tensors"]
    text = events.Tensors("prompts/k1_sample0")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("| what | text |\n|---|---|\n| target | <code>")
    rows = logged_run[0].values()
    costs = [event.step for event in events.Scalars("cost/best_lcs")]
    assert costs == sorted(costs)
    assert costs[-1] == sum(row.forward_tokens + row.backward_tokens for row in rows)
    assert events.Scalars("finished/exact")[-1].value == sum(row.exact for row in rows)
    final = events.Scalars("finished/mean_lcs")[-1].value
    assert final == pytest.approx(sum(row.lcs for row in rows) / len(rows))
    assert all(event.value > 0 for event in events.Scalars("train/grad_norm_Z"))


def test_a_search_after_a_relaxation_has_no_temperatures(data, fit, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    refined = Refined(DLMI(tau0=1.0, num_samples=2), SwapSearch(width=2), after=0.5)
    fit(small(refined), data(texts=["w1 w2 w3"]), logger=logger, callbacks=[TensorBoardDetails()])
    events = EventAccumulator(logger.log_dir, {"histograms": 0}).Reload()  # all of them
    [tag] = (tag for tag in events.Tags()["histograms"] if tag.startswith("per_position_tau/"))
    assert [event.step for event in events.Histograms(tag)] == [0, 4]
    assert len(events.Scalars("eval/tau")) == 2
    assert len(events.Scalars("eval/lcs")) == 3


def test_at_most_25_targets_have_a_curve_of_their_own(data, fit, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    made = data(k=(1,), per_k=26)
    fit(small(), made, logger=logger, callbacks=[TensorBoardDetails()])
    scalars = EventAccumulator(logger.log_dir).Reload().Tags()["scalars"]
    assert sum(tag.startswith("targets/") for tag in scalars) == 25


def test_hyperparameters_are_those_that_were_chosen(logged_run):
    logged = logged_run[1].hparams
    expected = {
        **{"method": "DLMI", "tau0": 1.0, "num_samples": 2, "steps": 8, "eval_every": 4},
        **{"prompt_length": 4, "seed": 0, "dtype": "float64", "batch_size": 2},
        **{"targets": "ByRank", "targets.k": [1, 3], "targets.per_k": 2, "targets.length": 4},
    }
    assert {name: logged[name] for name in expected} == expected
    events = EventAccumulator(logged_run[1].log_dir).Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    columns = HParamsPluginData.FromString(content).session_start_info.hparams
    assert set(columns) == {*expected, "lm"}
    written = (Path(logged_run[1].log_dir) / "hparams.yaml").read_text()
    assert "tau0: 1.0" in written
    assert "!!python" not in written


def test_a_search_without_parameters_is_followed(data, fit, tmp_path, capsys):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    callbacks = [TensorBoardDetails(), InversionProgress()]
    options = {"logger": logger, "callbacks": callbacks, "log_every_n_steps": 1}
    search = small(SwapSearch(width=2, num_starts=2))
    rows = fit(search, data(), enable_progress_bar=True, **options)
    events = EventAccumulator(logger.log_dir).Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= {"train/loss", "eval/lcs", "eval/token_passes", "final/mean_lcs"}
    assert not any("grad_norm" in name for name in scalars)
    assert len(rows) == 4
    assert capsys.readouterr().out.startswith("SwapSearch on ")


def test_after_a_run_on_questions_the_command_that_counts_answers_is_named(
    data, fit, tmp_path, capsys
):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "w1", "answer": "w2"}\n')
    made = data(targets=Questions(str(path)), template="{question} {slot}")
    logger = TensorBoardLogger(tmp_path)
    fit(small(), made, logger=logger, callbacks=[InversionProgress()], enable_progress_bar=True)
    command = f"python -m dlmi score --results {logger.log_dir} --examples OTHER_FILE.jsonl\n"
    assert command in capsys.readouterr().out


def test_progress_in_a_log_file_is_plain_lines(data, fit, capsys):
    fit(small(), data(), callbacks=[InversionProgress(log_seconds=0)], enable_progress_bar=True)
    lines = capsys.readouterr().out.splitlines()
    assert "4 targets, N=4, at most 8 steps each, 2 at a time" in lines[0]
    line = next(line for line in lines if "steps/s" in line)
    assert "0/4 targets" in line
    assert "in flight" in line
    assert "left" in line
    assert "\x1b" not in "".join(lines)
    assert sum(line.startswith(("k1_", "k3_")) for line in lines) == 4


def test_progress_on_a_terminal_draws_a_bar(data, fit):
    progress = InversionProgress()
    progress.console = Console(force_terminal=True, width=120, record=True)
    fit(small(), data(), callbacks=[progress], enable_progress_bar=True)
    assert "Honest results" in progress.console.export_text()


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "0:00:05"), (3725, "1:02:05"), (200_000, "2 d 7 h")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_model_text_cannot_reach_the_terminal_raw(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "decode", lambda ids: "\x1b[2J\u202e[bold]")
    text = marked_output(tiny, [1], [1]).plain
    assert text == "\\x1b[2J\\u202e[bold]"
    assert "\x1b" not in visible("\x1b\x07\x9b")
    assert "<" not in escape_markdown("<script>")


def test_one_step_is_not_many(data, fit, capsys):
    short = Inverter(DLMI(num_samples=2), 4, steps=1)
    fit(short, data(), callbacks=[InversionProgress()], enable_progress_bar=True)
    shown = capsys.readouterr().out
    assert "at most 1 step each" in shown
    assert "after 1 step, " in shown


def test_summary_table_counts_by_k(logged_run):
    console = Console(width=120, file=io.StringIO())
    console.print(summary_table(list(logged_run[0].values())))
    text = console.file.getvalue()
    assert "│   1 │       2 │" in text
    assert "│ all │       4 │" in text


def test_target_ids_are_shown_without_their_escape_codes(data, fit, tmp_path, capsys):
    file = tmp_path / "targets.jsonl"
    file.write_text('{"id": "[bold]\\u001b[31m\\u202e", "text": "w1 w2"}\n')
    made = data(file=file)
    fit(small(), made, callbacks=[InversionProgress()], enable_progress_bar=True)
    shown = capsys.readouterr().out
    assert "[bold]\\x1b[31m\\u202e" in shown
    assert not set(shown) & {"\x1b", "\u202e"}


def test_markdown_spells_bidi_characters_out():
    assert "202e" in escape_markdown("a\u202eb")


def test_an_error_gives_the_signals_back(data, fit):
    class Broken(Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        fit(small(), data(), callbacks=[RunCheckpoint(), Broken()], enable_checkpointing=True)
    assert signal.getsignal(signal.SIGINT) is before
