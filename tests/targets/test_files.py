"""Files of targets, whoever wrote them."""

import json

import pytest

from dlmi import InputError
from dlmi.targets.by_rank import generate_targets
from dlmi.targets.files import read_targets, texts_to_targets, write_targets
from dlmi.targets.target import Target


def test_files_read_back_bit_for_bit(tiny, tmp_path):
    targets = generate_targets(tiny, [1, 5], 3, 6)
    write_targets(tmp_path / "targets.jsonl", targets)
    assert read_targets(tiny, tmp_path / "targets.jsonl") == targets


def test_text_files_and_texts(tiny, tmp_path):
    (tmp_path / "targets.txt").write_text("w1 w2\n\nw3\n")
    targets = read_targets(tiny, tmp_path / "targets.txt")
    assert [(t.id, t.ids) for t in targets] == [("line_1", (4, 5)), ("line_3", (6,))]
    assert texts_to_targets(tiny, ["w1 w2"])[0] == Target.single("text_0", (4, 5), "w1 w2")


def test_jsonl_with_text_or_ids(tiny, tmp_path):
    path = tmp_path / "targets.jsonl"
    path.write_text('{"text": "w1"}\n{"ids": [5, 6], "k": 3, "id": "mine"}\n')
    first, second = read_targets(tiny, path)
    assert first == Target.single("line_1", (4,), "w1")
    assert second == Target.single("mine", (5, 6), "w2 w3", k=3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2.*JSON object"),
        ("[1]", "line 2.*`ids` or `text`"),
        ('{"k": 1}', "line 2.*`ids` or `text`"),
        ('{"ids": []}', "line 2.*non-empty list"),
        ('{"ids": [1.5]}', "line 2.*token ids"),
        ('{"ids": [true]}', "line 2.*token ids"),
        ('{"ids": [99]}', r"line 2.*\(0 to 31\).*99"),
        ('{"ids": [-1]}', r"line 2.*\(0 to 31\).*-1"),
        ('{"text": "  "}', "line 2.*at least one token"),
        ('{"text": 3}', "line 2.*expected `str`, got `int`.*text`"),
        ('{"text": "w1", "k": "1"}', "line 2.*`k`"),
        ('{"text": "w1", "id": 7}', "line 2.*`id`"),
    ],
)
def test_malformed_lines_are_named(tiny, tmp_path, line, message):
    path = tmp_path / "targets.jsonl"
    path.write_text(json.dumps({"text": "w1"}) + "\n" + line + "\n")
    with pytest.raises(InputError, match=message):
        read_targets(tiny, path)


@pytest.mark.parametrize("odd", ["\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\u2029", "\r"])
def test_only_a_newline_ends_a_line(tiny, tmp_path, odd):
    target = Target.single(f"a{odd}b", (4, 5), f"w1{odd}w2")
    write_targets(tmp_path / "targets.jsonl", [target])
    assert read_targets(tiny, tmp_path / "targets.jsonl") == [target]


def test_files_of_windows_editors(tiny, tmp_path):
    (tmp_path / "targets.txt").write_bytes(b"\xef\xbb\xbfw1\r\n\r\nw2\r\n")
    targets = read_targets(tiny, tmp_path / "targets.txt")
    assert [(target.id, target.text) for target in targets] == [("line_1", "w1"), ("line_3", "w2")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"ids": [' + b"9" * 5000 + b"]}", "more than 64 bits|out of range|too long|not JSON"),
        (b'{"text": "w1 \\ud800"}', "not JSON"),
        (b'{"ids": [4], "ranks": "abc"}', "expected `array [|] null`, got `str` at `ranks`"),
        (b'{"ids": [4], "perplexity": "high"}', "got `str` at `perplexity`"),
        (b'{"ids": [4], "k": 99999999999999999999}', "whole number of more than 64 bits"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_hostile_lines_are_named(tiny, tmp_path, line, message):
    (tmp_path / "targets.jsonl").write_bytes(line)
    with pytest.raises(InputError, match=f"line 1.*{message}"):
        read_targets(tiny, tmp_path / "targets.jsonl")
