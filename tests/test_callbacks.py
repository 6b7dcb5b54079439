"""What a run stores and shows, and that watching it changes nothing."""

import io
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlmi import DLMI, read_rows
from dlmi.callbacks import InversionProgress, ResultWriter, TensorBoardDetails
from dlmi.display import clock, escape_markdown, marked_output, summary_table, visible

SMALL = {"prompt_length": 4, "steps": 8, "eval_every": 4, "num_samples": 2, "tau0": 1.0}


@pytest.fixture
def logged_run(data, fit, tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    callbacks = [ResultWriter(), TensorBoardDetails(), InversionProgress()]
    options = {"logger": logger, "callbacks": callbacks, "log_every_n_steps": 2}
    rows = fit(DLMI(**SMALL), data(), enable_progress_bar=True, **options)
    return rows, logger.log_dir


def test_callbacks_do_not_change_a_result(logged_run, data, fit):
    bare = fit(DLMI(**SMALL), data())
    rows, folder = logged_run
    assert {r.target_id: r.prompt_ids for r in read_rows_of(folder)} == {
        target_id: row.prompt_ids for target_id, row in bare.items()
    }
    assert len(rows) == 4


def read_rows_of(folder):
    return read_rows(Path(folder))


def test_tensorboard_has_every_curve(logged_run):
    events = EventAccumulator(logged_run[1]).Reload()
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
        "finished/exact_rate",
        "final/mean_lcs",
        "final/exact_rate",
    }
    assert set(tags["histograms"]) == {"tau_per_position", "entropy_per_position"}
    assert "slot 0/text_summary" in tags["tensors"]
    rows = logged_run[0].values()
    final = events.Scalars("finished/mean_lcs")[-1].value
    assert final == pytest.approx(sum(row.lcs for row in rows) / len(rows))
    assert all(event.value > 0 for event in events.Scalars("train/grad_norm_Z"))


def test_progress_in_a_log_file_is_plain_lines(data, fit, capsys):
    fit(
        DLMI(**SMALL),
        data(),
        callbacks=[InversionProgress(log_seconds=0)],
        enable_progress_bar=True,
    )
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
    fit(DLMI(**SMALL), data(), callbacks=[progress], enable_progress_bar=True)
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


def test_summary_table_counts_by_k(logged_run):
    console = Console(width=120, file=io.StringIO())
    console.print(summary_table(list(logged_run[0].values())))
    text = console.file.getvalue()
    assert "│   1 │       2 │" in text
    assert "│ all │       4 │" in text


def test_target_ids_are_shown_without_their_escape_codes(data, fit, tmp_path, capsys):
    file = tmp_path / "targets.jsonl"
    file.write_text('{"id": "[bold]\\u001b[31m\\u202e", "text": "w1 w2"}\n')
    made = data(targets_file=str(file))
    fit(DLMI(**SMALL), made, callbacks=[InversionProgress()], enable_progress_bar=True)
    shown = capsys.readouterr().out
    assert "[bold]\\x1b[31m\\u202e" in shown
    assert not set(shown) & {"\x1b", "\u202e"}


def test_markdown_spells_bidi_characters_out():
    assert "202e" in escape_markdown("a\u202eb")
