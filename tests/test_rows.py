"""Rows of earlier versions are read; invalid ones give one clear line; torch is not needed."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import dlmi.methods
from dlmi.errors import InputError
from dlmi.gradient_rows import read_gradient_rows
from dlmi.jsonl import build, parse_object
from dlmi.rows import Inversion, count_finished, read_rows, upgrade
from dlmi.targets.context import Context

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docs" / "benchmark").rglob("results.jsonl"))


@pytest.fixture(scope="module")
def old():
    """A row as it was written before there were metrics."""
    return json.loads(FILES[0].read_text().split("\n")[0])


def test_all_rows_of_the_benchmark_are_read():
    rows = [row for file in FILES for row in read_rows(file)]
    assert len(rows) == 412
    assert all(row.metrics["lcs"] == row.lcs for row in rows)
    assert {row.context for row in rows} == {None}
    assert {row.method for row in rows} >= {"EchoSearch", "DLMI"}


def test_a_row_survives_being_written(old):
    row = Inversion.from_json(old)
    assert Inversion.from_json(json.loads(row.to_json_line())) == row
    written = json.loads(row.to_json_line())
    assert {"lcs", "exact", "seconds", "steps", "forward_tokens", "metrics"} <= written.keys()


def test_nan_and_infinity_survive(old):
    row = Inversion.from_json(old)
    point = dataclasses.replace(row.trace[0], discrete_loss=math.inf, means={"tau": math.nan})
    row = dataclasses.replace(row, discrete_loss=math.nan, trace=(point,))
    row = dataclasses.replace(row, diagnostics={"tau": (1.0, math.inf)})
    again = Inversion.from_json(json.loads(row.to_json_line()))
    numbers = (again.discrete_loss, again.trace[0].discrete_loss, again.trace[0].means["tau"])
    assert all(map(math.isnan, (*numbers, again.diagnostics["tau"][1])))


FRAME = {
    "pieces": [[1], [2]],
    "slot_lengths": [3],
    "head": 1,
    "template": "a {slot}",
    "chat": True,
    "reasoning": {"max_tokens": 9, "trigger": "!", "trigger_ids": [5]},
}


def test_a_frame_becomes_a_context(old):
    example = {"id": "e", "ids": [1], "text": "x", "frame": FRAME, "full_text": "y"}
    example |= {"output_ids": [1], "output_text": "x", "lcs": 1.0, "exact": True}
    row = Inversion.from_json({**old, "frame": FRAME, "examples": [example]})
    assert row.context.pieces == ((1,), (2,))
    assert row.context.blank_lengths == (3,)
    assert row.context.read_once == 1
    assert row.context.reasoning.trigger_ids == (5,)
    assert row.examples[0].context == row.context


def test_a_search_after_a_relaxation_becomes_refined(old):
    settings = {"tau0": 1.0, "refine_after": 0.5, "refine_width": 16, "steps": 9, "seed": 0}
    row = Inversion.from_json({**old, "method": "DLMI", "settings": settings})
    assert row.method == "Refined"
    assert row.settings == {
        "first": {"method": "DLMI", "tau0": 1.0},
        "search": {"method": "SwapSearch", "width": 16},
        "after": 0.5,
        "steps": 9,
        "seed": 0,
    }
    alone = {**settings, "refine_after": 1.0}
    assert Inversion.from_json({**old, "method": "DLMI", "settings": alone}).settings == alone


def test_a_row_of_today_is_left_alone(old):
    row = upgrade(old)
    assert upgrade(row) is row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_ids": [1, "2"]}, "expected `int`, got `str` at `target_ids[1]`"),
        ({"lcs": None}, "expected `float`, got `null` at `lcs`"),
        ({"frame": "x"}, "expected `object | null`, got `str` at `context`"),
        ({"frame": {"pieces": [[1]]}}, "one piece more than blanks"),
        ({"trace": 3}, "expected `array`, got `int` at `trace`"),
        ({"examples": [3]}, "expected `object`, got `int` at `examples[0]`"),
        ({"settings": [[]]}, "expected `object`, got `array` at `settings`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_row_is_one_line_with_its_place(old, change, message, tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(old) + "\n\n" + json.dumps({**old, **change}) + "\n")
    with pytest.raises(InputError) as caught:
        read_rows(file)
    assert f"{file}, line 3, to be a result row, but " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        *(b"[" * 100_000, b'{"a":' * 17 + b"1" + b"}" * 17, b'{"a": 9223372036854775808}', b"[1]"),
        *(b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff", b'{"a": "\xff"}', b"", b'{"a": 1} {}'),
    ],
    ids=lambda line: repr(line[:16]),
)
def test_anything_but_an_object_is_refused(line):
    with pytest.raises(InputError):
        parse_object(line)


def test_further_keys_are_ignored():
    assert build(Context, {"chat": True, "color": "red"}) == Context(chat=True)


def test_rows_of_several_ranks_are_merged_on_reading(old, tmp_path):
    def write(name, **changes):
        (tmp_path / name).write_text(json.dumps({**old, **changes}) + "\n")

    write("results.jsonl", target_id="a", stop_reason="interrupted")
    write("results.worker1.jsonl", target_id="a", stop_reason="solved")
    write("results.rank2.jsonl", target_id="b", stop_reason="budget")
    assert {r.target_id: r.stop_reason for r in read_rows(tmp_path)} == {
        "a": "solved",
        "b": "budget",
    }
    assert count_finished(tmp_path) == 2


def test_interrupted_rows_of_any_age_do_not_count(old, tmp_path):
    row = dataclasses.replace(Inversion.from_json(old), stop_reason="interrupted")
    lines = [json.dumps({**old, "stop_reason": "interrupted"}) + "\n", row.to_json_line()]
    (tmp_path / "results.jsonl").write_text("".join(lines) + json.dumps(old) + "\n")
    assert count_finished(tmp_path) == 1


def test_a_gradient_row_of_wrong_type_is_noted(tmp_path):
    (tmp_path / "gradients.jsonl").write_text('{"estimator": 3}\n')
    assert read_gradient_rows(tmp_path)[0] == []


@pytest.mark.parametrize(
    "module", ["dlmi", "dlmi.rows", "dlmi.gradient_rows", "dlmi.metrics", "dlmi.text"]
)
def test_rows_need_no_torch(module):
    heavy = "('torch', 'lightning', 'transformers', 'numpy', 'scipy', 'rich')"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "[]\n"


def test_every_method_is_a_public_name():
    assert set(dlmi.methods.__all__) <= set(dlmi.__all__) == set(dir(dlmi))
    assert all(getattr(dlmi, name) is not None for name in dlmi.__all__)
