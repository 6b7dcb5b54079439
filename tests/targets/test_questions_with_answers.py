"""Questions with answers: files, the packaged ones, and the answer in a text."""

import json
import re
import runpy
from pathlib import Path

import pytest

from dlmi import InputError
from dlmi.targets.questions import Question, find_answer, load_questions, normalise, read_questions

make_sums = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_sums.py"))
SIZES, as_json_lines = make_sums["SIZES"], make_sums["as_json_lines"]

# ---- answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She sold 48/2 = 24 clips.\nThen 48+24 = 72.\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### $18.00 per week, not 20", "18"),
        ("####-5", "-5"),
        ("#### 3\n#### 4", "4"),
        ("#### none", None),
        ("8 - 6 = 2 stamps are left.", "2"),
        ("8-6", "6"),  # a difference, no negative number
        ("It fell to -6 degrees.", "-6"),
        ("In 2,000 years: 1, 2, 3.", "3"),
        ("about .50", "0.5"),
        ("007", "7"),
        ("-0.0", "0"),
        ("**12**.", "12"),
        ("three", None),
        ("", None),
    ],
)
def test_final_number(text, answer):
    assert find_answer(text) == answer


def test_final_text():
    assert find_answer("So it is\n#### Positive.\nIndeed", is_number=False) == "positive"
    assert find_answer("  A PLANT.\n", is_number=False) == "a plant"
    assert find_answer(" . ", is_number=False) is None


@pytest.mark.parametrize(
    "text", ["1000", "1,000", "$1,000", " 1000. ", "1000.00", "+1000", "1000%"]
)
def test_equal_numbers_are_equal(text):
    assert normalise(text) == "1000"


# ---- questions


def test_gsm8k_lines_are_read(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [
        {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        {"question": "Which?", "answer": "Yes", "more": 1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second = read_questions(path)
    assert (first.final, second.final) == ("4", "yes")
    assert load_questions(str(path), limit=1) == [first]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "How many?"}', "line 1, .*missing required field `answer`"),
        ('{"question": " ", "answer": "1"}', "`question` is empty"),
        ('{"question": "How many?", "answer": "I see\\n#### "}', "no final answer"),
        ('{"question": 3, "answer": "1"}', "expected `str`, got `int` at `question`"),
        ("no", "it is not JSON"),
        ("", "it is empty"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_questions(path)


def test_sources_that_are_not_there():
    with pytest.raises(InputError, match="a JSONL file or `hub:NAME`, but got nowhere.jsonl"):
        load_questions("nowhere.jsonl")
    with pytest.raises(InputError, match="`limit` to be at least 1"):
        load_questions(limit=0)


def test_hub_without_its_package_names_the_way_out(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install datasets.*grade-school-math"):
        load_questions("hub:openai/gsm8k")


def test_packaged_questions_are_what_the_generator_makes():
    parts = make_sums["make_sums"]()
    for split, size in SIZES.items():
        questions = load_questions(split=split)
        assert questions == [Question(**row) for row in parts[split]]
        assert len(questions) == len({q.question for q in questions}) == size
    assert as_json_lines(parts["test"]) == as_json_lines(make_sums["make_sums"]()["test"])


def test_packaged_answers_are_right_and_held_out():
    seen = {}
    for split in SIZES:
        for question in load_questions(split=split):
            left, sign, right, result = re.fullmatch(
                r"(\d+) ([+-]) (\d+) = (\d+)", question.answer.split("\n####")[0]
            ).groups()
            a, b = int(left), int(right)
            assert result == question.final == str(a + b if sign == "+" else a - b)
            assert re.findall(r"\d+", question.question) == [left, right]
            numbers = (sign, *(sorted((a, b)) if sign == "+" else (a, b)))
            seen.setdefault(split, set()).add(numbers)
    assert not seen["train"] & seen["test"]
