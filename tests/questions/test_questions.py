"""How many questions an LM answers right after a prompt."""

import json

import pytest

from dlmi import InputError, load_lm
from dlmi.questions.scoring import (
    Accuracy,
    Answered,
    Decoding,
    changes,
    check_template,
    random_prompts,
    score_each,
    score_prompt,
)
from dlmi.targets.questions import Question, load_questions, normalise
from dlmi.targets.template import Template

# ---- scores

TEMPLATE = Template("{question} {slot} w3", setting="`template`")
SHORT = Decoding(max_new_tokens=2, stop=None)


def questions_of(lm, prompt, wrong=()):
    """Questions whose answers are what the LM says, but for those that are to be wrong."""
    questions = [f"w{i} w{i + 3}" for i in range(6)]
    rows = [TEMPLATE.ids(lm, {"question": question}, prompt, "") for question in questions]
    answers = [lm.decode(ids) for ids in lm.generate(rows, 2)]
    return [
        Question(question, "another" if i in wrong else f"as said\n#### {answer}")
        for i, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]


@pytest.mark.parametrize("prompt", ["w7 w8", [9, 10]])
def test_accuracy_is_the_share_of_right_answers(tiny, prompt):
    accuracy = score_prompt(tiny, TEMPLATE, prompt, questions_of(tiny, prompt, (1, 4)), SHORT)
    assert (accuracy.right, accuracy.value) == (4, 4 / 6)
    assert [a.is_right for a in accuracy.answered] == [True, False, True, True, False, True]
    assert accuracy.prompt_text == (prompt if isinstance(prompt, str) else tiny.decode(prompt))
    assert accuracy.answered[1].expected == "another"
    assert all(a.answer == normalise(a.output_text) for a in accuracy.answered)


def test_two_stages_read_the_answer_behind_the_trigger(tiny):
    how = Decoding(max_new_tokens=2, stop=None, trigger=" w20", max_reasoning_tokens=3)
    [answered] = score_prompt(tiny, TEMPLATE, "w7", [Question("w1 w2", "x")], how).answered
    row = TEMPLATE.ids(tiny, {"question": "w1 w2"}, "w7", "")
    reasoning = tiny.generate([row], 3)[0]
    said = tiny.generate([[*row, *reasoning, *tiny.encode(" w20")]], 2)[0]
    assert answered.output_text == tiny.decode(reasoning) + " w20" + tiny.decode(said)
    assert answered.answer == normalise(tiny.decode(said))


def test_interval_is_wilsons():
    answered = tuple(Answered("", "", "", None, i < 8) for i in range(10))
    assert Accuracy("", None, answered).interval == pytest.approx((0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize("text", ["{slot}", "{question}{question}{slot}", "{question}{more}{slot}"])
def test_a_template_has_one_question(text):
    with pytest.raises(InputError, match="Expected `template` to have {question} once"):
        check_template(Template(text))


def test_change_is_relative_to_the_empty_slot(tiny):
    questions = questions_of(tiny, "", wrong=(0,))
    scores = dict(score_each(tiny, TEMPLATE, ["w9", [4, 5, 6]], questions, SHORT, draws=2))
    assert list(scores) == [
        *("nothing", "step by step", "random 1", "random 2", "prompt 1", "prompt 2")
    ]
    assert scores["nothing"].right == 5
    assert changes(scores)["nothing"] == 0
    for name, change in changes(scores).items():
        assert change == pytest.approx(scores[name].right / 5 - 1)
    none_right = {"nothing": Accuracy("", None, (Answered("", "1", "", None, False),))}
    assert changes(none_right) == {"nothing": None}
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
    from dlmi.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["score", *map(str, arguments)])
    return end.value.code


def test_command_prints_a_table_and_writes_every_answer(tiny, model_folder, tmp_path, capsys):
    file, out = tmp_path / "questions.jsonl", tmp_path / "scores.json"
    questions = questions_of(tiny, "", wrong=(0, 1, 2))
    file.write_text("".join(json.dumps(vars(question)) + "\n" for question in questions))
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
    assert first["interval"] == pytest.approx((0.1876, 0.8124), abs=1e-4)
    assert [a["is_right"] for a in first["answered"]] == [False] * 3 + [True] * 3
    assert last["prompt_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--examples", "nowhere.jsonl"), "Expected the questions"),
        (("--template", "{question}"), "Expected `template` to have at least one `{slot}`"),
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
    questions = load_questions(limit=8)
    template = Template("{question}{slot}", chat=True)
    together = score_prompt(lm, template, "", questions, Decoding(batch_size=8))
    alone = score_prompt(lm, template, "", questions[:3], Decoding(batch_size=1))
    assert together.answered[:3] == alone.answered
    assert 0 < together.right < 8
