"""The packaged questions are what their generator makes, right and held out."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_sums", ROOT / "scripts" / "make_sums.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packaged_examples_are_what_the_generator_makes(script):
    parts, again = script.make_sums(), script.make_sums()
    assert parts == again
    assert ROOT / "dlmi" / "targets" / "data" == script.DATA
    for split, size in script.SIZES.items():
        text = (script.DATA / f"sums_{split}.jsonl").read_text(encoding="utf-8")
        assert script.as_json_lines(parts[split]) == text
        assert len({example["question"] for example in parts[split]}) == size


def test_packaged_answers_are_right_and_held_out(script):
    seen = {}
    for split in script.SIZES:
        lines = (script.DATA / f"sums_{split}.jsonl").read_text(encoding="utf-8").splitlines()
        for example in map(json.loads, lines):
            match = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)\n#### (\d+)", example["answer"])
            left, sign, right, result, final = match.groups()
            a, b = int(left), int(right)
            assert result == final == str(a + b if sign == "+" else a - b)
            assert re.findall(r"\d+", example["question"]) == [left, right]
            numbers = (sign, *(sorted((a, b)) if sign == "+" else (a, b)))
            assert seen.setdefault(numbers, split) == split
