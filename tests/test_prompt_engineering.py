"""Questions, answers, and how many an LM gets right after a prompt."""

import json
import re

import pytest
import torch
from conftest import KINDS
from scipy.stats import binomtest
from test_passes import random_ids

from dlmi import InputError, load_lm
from dlmi.cli import main
from dlmi.prompt_engineering import (
    Decoding,
    Example,
    QuestionTemplate,
    find_answer,
    load_examples,
    normalise,
    random_prompts,
    read_examples,
    score_each,
    score_prompt,
)
from dlmi.prompt_engineering.baselines import changes
from dlmi.prompt_engineering.decoding import decode_greedily, end_ids
from dlmi.prompt_engineering.scoring import relative_change, wilson_interval
from dlmi.prompt_engineering.sums import SIZES, as_json_lines, make_sums

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


# ---- examples


def test_gsm8k_lines_are_read(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [
        {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        {"question": "Which?", "answer": "Yes", "more": 1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second = read_examples(path)
    assert (first.final, first.rationale) == ("4", "2 + 2 = <<2+2=4>>4")
    assert (second.final, second.rationale) == ("yes", None)
    assert load_examples(str(path), limit=1) == [first]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "How many?"}', "line 1, .*`answer` is missing"),
        ('{"question": " ", "answer": "1"}', "`question` is empty"),
        ('{"question": "How many?", "answer": "I see\\n#### "}', "no final answer"),
        ('{"question": 3, "answer": "1"}', "`question`: expected a text"),
        ("no", "it is not JSON"),
        ("", "it is empty"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_examples(path)


def test_sources_that_are_not_there():
    with pytest.raises(InputError, match="a JSONL file or `hub:NAME`, but got nowhere.jsonl"):
        load_examples("nowhere.jsonl")
    with pytest.raises(InputError, match="`limit` to be at least 1"):
        load_examples(limit=0)


def test_hub_without_its_package_names_the_way_out(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install datasets.*grade-school-math"):
        load_examples("hub:openai/gsm8k")


def test_packaged_examples_are_what_the_generator_makes():
    parts = make_sums()
    for split, size in SIZES.items():
        examples = load_examples(split=split)
        assert examples == parts[split]
        assert len(examples) == len({e.question for e in examples}) == size
    assert as_json_lines(parts["test"]) == as_json_lines(make_sums()["test"])


def test_packaged_answers_are_right_and_held_out():
    seen = {}
    for split in SIZES:
        for example in load_examples(split=split):
            left, sign, right, result = re.fullmatch(
                r"(\d+) ([+-]) (\d+) = (\d+)", example.rationale
            ).groups()
            a, b = int(left), int(right)
            assert result == example.final == str(a + b if sign == "+" else a - b)
            assert re.findall(r"\d+", example.question) == [left, right]
            numbers = (sign, *(sorted((a, b)) if sign == "+" else (a, b)))
            seen.setdefault(split, set()).add(numbers)
    assert not seen["train"] & seen["test"]


# ---- decoding


@pytest.mark.parametrize("kind", KINDS)
def test_side_by_side_says_what_each_says_alone(kind, model_folder):
    """Rows of many lengths, padded on the left; the batch shrinks as rows end."""
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    rows = [random_ids(lm, length, seed=length).tolist() for length in (7, 1, 4, 2, 9, 3)]
    alone = [decode_greedily(lm, [row], 8)[0] for row in rows]
    for batch_size in (2, 6):
        assert decode_greedily(lm, rows, 8, batch_size=batch_size) == alone
    for row, said in zip(rows, alone, strict=True):
        free = lm.greedy(torch.tensor([row]), 8)[0].tolist()
        ended = next((i for i, token in enumerate(free) if token in end_ids(lm)), 8)
        assert said == free[:ended]
    assert len({len(said) for said in alone}) > 1 or kind not in ("llama", "gpt2")


def test_a_text_or_the_end_of_the_sequence_ends_a_row(tiny, monkeypatch):
    row = [5, 6, 7]
    free = tiny.greedy(torch.tensor([row]), 6)[0].tolist()
    third = free[2]
    first = free.index(third)
    stop = tiny.decode([third])
    assert decode_greedily(tiny, [row], 6, stop)[0] == free[: first + 1]  # what ended it is left in
    monkeypatch.setattr("dlmi.prompt_engineering.decoding.end_ids", lambda lm: {third})
    assert decode_greedily(tiny, [row], 6)[0] == free[:first]


def test_rows_that_do_not_fit_are_refused(tiny):
    with pytest.raises(InputError, match="question 2 has 60 \\+ 5"):
        decode_greedily(tiny, [[3], [3] * 60], 5)
    with pytest.raises(InputError, match="at least 1 token"):
        decode_greedily(tiny, [[]], 5)


# ---- templates


def test_template_puts_ids_and_texts_in_place(tiny):
    template = QuestionTemplate("w1 {question} w2 {slot} w3")
    ids = template.ids(tiny, "w5 {slot}", [9, 9])
    assert ids == [*tiny.encode("w1 w5 {slot} w2"), 9, 9, *tiny.encode("w3")]
    assert template.ids(tiny, "w5", "w7") == tiny.encode("w1 w5 w2 w7 w3")


@pytest.mark.parametrize("text", ["{question}", "{slot}", "{question}{slot}{slot}"])
def test_template_must_have_both_places_once(text):
    with pytest.raises(InputError, match="Expected `template` to have"):
        QuestionTemplate(text)


def test_chat_needs_a_chat_template(tiny, monkeypatch):
    template = QuestionTemplate("{question} {slot}", chat=True)
    with pytest.raises(InputError, match="has none. Write the marks"):
        template.ids(tiny, "w1", "")
    monkeypatch.setattr(
        tiny.tokenizer, "chat_template", "{% for m in messages %}w9 {{ m.content }} w8{% endfor %}"
    )
    assert template.ids(tiny, "w1", [4]) == [*tiny.encode("w9 w1"), 4, *tiny.encode("w8")]


# ---- scores

TEMPLATE = QuestionTemplate("{question} {slot} w3")
SHORT = Decoding(max_new_tokens=2, stop=None)


def examples_of(lm, prompt, wrong=()):
    """Questions whose answers are what the LM says, but for those that are to be wrong."""
    questions = [f"w{i} w{i + 3}" for i in range(6)]
    rows = [TEMPLATE.ids(lm, question, prompt) for question in questions]
    answers = [lm.decode(ids) for ids in decode_greedily(lm, rows, 2)]
    return [
        Example(question, "another" if i in wrong else f"as said\n#### {answer}")
        for i, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]


@pytest.mark.parametrize("prompt", ["w7 w8", [9, 10]])
def test_accuracy_is_the_share_of_right_answers(tiny, prompt):
    accuracy = score_prompt(tiny, TEMPLATE, prompt, examples_of(tiny, prompt, (1, 4)), SHORT)
    assert (accuracy.right, accuracy.value) == (4, 4 / 6)
    assert [a.is_right for a in accuracy.answered] == [True, False, True, True, False, True]
    assert accuracy.prompt_text == (prompt if isinstance(prompt, str) else tiny.decode(prompt))
    assert accuracy.answered[1].expected == "another"
    assert all(a.answer == normalise(a.output_text) for a in accuracy.answered)


def test_two_stages_read_the_answer_behind_the_trigger(tiny):
    how = Decoding(max_new_tokens=2, stop=None, trigger=" w20", max_reasoning_tokens=3)
    [answered] = score_prompt(tiny, TEMPLATE, "w7", [Example("w1 w2", "x")], how).answered
    row = TEMPLATE.ids(tiny, "w1 w2", "w7")
    reasoning = decode_greedily(tiny, [row], 3)[0]
    said = decode_greedily(tiny, [[*row, *reasoning, *tiny.encode(" w20")]], 2)[0]
    assert answered.output_text == tiny.decode(reasoning) + " w20" + tiny.decode(said)
    assert answered.answer == normalise(tiny.decode(said))


@pytest.mark.parametrize(("right", "total"), [(0, 5), (5, 5), (8, 10), (31, 80)])
def test_interval_is_wilsons(right, total):
    expected = binomtest(right, total).proportion_ci(method="wilson")
    assert wilson_interval(right, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_change_is_relative_to_the_empty_slot(tiny):
    assert relative_change(0.6, 0.4) == pytest.approx(0.5)
    assert relative_change(0.6, 0.0) is None
    examples = examples_of(tiny, "", wrong=(0,))
    scores = dict(score_each(tiny, TEMPLATE, ["w9", [4, 5, 6]], examples, SHORT, draws=2))
    assert list(scores) == [
        *("nothing", "step by step", "random 1", "random 2", "prompt 1", "prompt 2")
    ]
    assert scores["nothing"].right == 5
    assert changes(scores)["nothing"] == 0
    for name, change in changes(scores).items():
        assert change == pytest.approx(scores[name].right / 5 - 1)
    assert len(scores["random 1"].prompt_ids) == 3  # as long as the longest prompt


def test_random_prompts_depend_on_the_seed_alone(tiny):
    assert random_prompts(tiny, 4, 2, seed=1) == random_prompts(tiny, 4, 2, seed=1)
    first, second = random_prompts(tiny, 4, 2, seed=1)
    assert first != second
    assert random_prompts(tiny, 4, 1, seed=2) != [first]
    assert not {0, 1, 2} & {i for row in random_prompts(tiny, 50, 5, seed=0) for i in row}


@pytest.mark.parametrize("name", ["max_new_tokens", "max_reasoning_tokens", "batch_size"])
def test_counts_must_be_at_least_one(name):
    with pytest.raises(InputError, match=f"Expected `{name}` to be at least 1"):
        Decoding(**{name: 0})


# ---- the command


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["score", *map(str, arguments)])
    return end.value.code


def test_command_prints_a_table_and_writes_every_answer(tiny, model_folder, tmp_path, capsys):
    file, out = tmp_path / "questions.jsonl", tmp_path / "scores.json"
    file.write_text(as_json_lines(examples_of(tiny, "", wrong=(0, 1, 2))))
    options = ("--lm", model_folder(), "--dtype", "float64", "--chat", "false", "--draws", 1)
    settings = ("--template", TEMPLATE.text, "--max_new_tokens", 2, "--one_line", "false")
    sources = ("--examples", file, "--prompt", "w9 w8", "--prompt_ids", "[3, 4]", "--out", out)
    assert run(*options, *settings, *sources) == 0
    table = capsys.readouterr().out
    assert "6 questions" in table
    assert "3 of 6" in table
    written = json.loads(out.read_text())
    assert written["settings"]["max_new_tokens"] == 2
    names = [score["name"] for score in written["scores"]]
    assert names == ["nothing", "step by step", "random 1", "prompt 1", "prompt 2"]
    first, last = written["scores"][0], written["scores"][-1]
    assert (first["right"], first["total"], first["relative_change"]) == (3, 6, 0)
    assert first["interval"] == pytest.approx(wilson_interval(3, 6))
    assert [a["is_right"] for a in first["answered"]] == [False] * 3 + [True] * 3
    assert last["prompt_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--examples", "nowhere.jsonl"), "Expected `examples`"),
        (("--template", "{question}"), "Expected `template` to have {slot} once"),
        (("--draws", "-1"), "Expected `draws` to be at least 0"),
        (("--batch_size", "0"), "Expected `batch_size` to be at least 1"),
    ],
)
def test_mistakes_end_in_one_line(options, message, capsys):
    assert run(*options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.real
def test_packaged_model_answers_packaged_questions():
    """Some of them, not all; and side by side as alone."""
    lm = load_lm()
    examples = load_examples(limit=8)
    template = QuestionTemplate("{question}{slot}", chat=True)
    together = score_prompt(lm, template, "", examples, Decoding(batch_size=8))
    alone = score_prompt(lm, template, "", examples[:3], Decoding(batch_size=1))
    assert together.answered[:3] == alone.answered
    assert 0 < together.right < 8
