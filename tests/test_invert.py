"""One text, one call or one command: what it finds, what it says, and how it ends."""

import io
import json
import signal
import sys

import pytest
import torch
from conftest import make_config, make_tokenizer
from subprocess_runs import finish, start
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dlmi import FoundPrompt, FrozenLM, InputError, Progress, invert
from dlmi.cli import main
from dlmi.invert_text.request import AUTO_LENGTHS
from dlmi.invert_text.screen import SearchScreen, print_found

EASY = "w9 w9"  # four tokens suffice
LONGER = "w30 w4 w17"  # four do not, within these steps
HARD = "w1 w2 w9 w9 w9 w8"
FAST = {"steps": 120, "refine_width": 16}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Where nothing must be left behind."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".txt"]


@pytest.fixture
def command(model_folder):
    """Exit code of `invert` on the tiny LM."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["invert", *map(str, arguments), "--lm", str(model_folder())])
        return stop.value.code or 0

    return run


def say(lm, prompt_ids, length):
    """A fresh decode."""
    return tuple(lm.greedy(torch.tensor([list(prompt_ids)]), length)[0].tolist())


# ---- in Python


def test_a_text_gives_a_prompt_that_works_and_nothing_else(tiny, capfd):
    found = invert(tiny, EASY, prompt_length=4, **FAST)
    assert isinstance(found, FoundPrompt)
    assert found.exact
    assert found.lcs == found.pasted_lcs == 1
    assert found.text == found.output_text == found.pasted_output_text == EASY
    assert found.prompt_length == 4
    assert say(tiny, found.prompt_ids, 2) == found.row.target_ids
    assert say(tiny, tiny.encode(found.prompt_text), 2) == found.row.target_ids
    assert (found.row.stop_reason, found.row.method) == ("solved", "EchoSearch")
    assert capfd.readouterr() == ("", "")


def test_the_same_seed_finds_the_same_prompt(tiny):
    few = {"prompt_length": 4, "steps": 2, "refine_width": 8}
    prompts = [invert(tiny, HARD, seed=seed, **few).prompt_ids for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_auto_grows_until_a_length_works(tiny):
    seen = []
    found = invert(tiny, LONGER, on_progress=seen.append, **FAST)
    assert found.exact
    assert found.prompt_length in AUTO_LENGTHS[1:]
    tried = list(dict.fromkeys(progress.prompt_length for progress in seen))
    assert tried == list(AUTO_LENGTHS[: AUTO_LENGTHS.index(found.prompt_length) + 1])
    assert max(p.step for p in seen if p.prompt_length == 4) == FAST["steps"] // len(AUTO_LENGTHS)
    assert say(tiny, found.prompt_ids, 3) == found.row.target_ids


def test_texts_are_inverted_side_by_side_and_stay_in_order(tiny):
    seen: list[Progress] = []
    texts = [HARD, "w9", "w9"]
    limits = {"prompt_length": 4, "steps": 16, "refine_width": 16}
    found = invert(tiny, texts, on_progress=seen.append, **limits)
    assert [f.text for f in found] == texts
    assert [f.exact for f in found] == [False, True, True]
    assert [f.row.target_id for f in found] == ["text_0", "text_1", "text_2"]
    assert found[0].row.steps == 16 > found[1].row.steps
    hard = [progress for progress in seen if progress.text == HARD]
    assert [p.lcs for p in hard] == sorted(p.lcs for p in hard)  # best so far
    assert hard[-1].prompt_ids == found[0].prompt_ids
    assert {progress.text for progress in seen[:3]} == set(texts)


def test_the_first_exact_start_ends_the_others(tiny):
    alone = invert(tiny, EASY, prompt_length=4, **FAST).row.steps
    seen = []
    found = invert(tiny, EASY, prompt_length=4, restarts=6, on_progress=seen.append, **FAST)
    assert found.exact
    assert found.row.steps <= alone  # the first of the six is that one
    assert max(progress.step for progress in seen) == found.row.steps


def test_time_ends_a_search(tiny):
    found = invert(tiny, HARD, seconds=1e-6)
    assert not found.exact
    assert not found.interrupted
    assert found.row.steps == 1  # at the first length, and no other is begun
    assert found.prompt_length == AUTO_LENGTHS[0]


def test_a_pair_of_transformers_objects_and_another_method():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("llama"))
    pair = model, make_tokenizer()
    found = invert(pair, HARD, prompt_length=3, steps=4, method="GCG", restarts=2)
    assert found.row.method == "GCG"
    assert found.row.model == "unnamed"
    ids = torch.tensor([found.prompt_ids])
    for _ in found.output_ids:
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tuple(ids[0, 3:].tolist()) == found.output_ids


def test_prompts_without_the_words_of_the_text(tiny):
    found = invert(tiny, HARD, prompt_length=8, steps=3, forbid_target_tokens="ids")
    assert not set(found.prompt_ids) & set(found.row.target_ids)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"text": []}, "at least one text"),
        ({"text": ["w1", ""]}, "texts\\[1\\]"),
        ({"lm": 3}, "a pair \\(model, tokenizer\\), but got int"),
        ({"seconds": 0}, "`seconds` to be positive"),
        ({"temperature": 1}, "options of EchoSearch .*but got 'temperature'"),
        ({"prompt_length": 63}, "at most 64"),
    ],
)
def test_what_cannot_be_is_refused(tiny, changes, line):
    with pytest.raises(InputError, match=line):
        invert(**{"lm": tiny, "text": EASY, "steps": 1, **changes})


# ---- on the command line


def test_solved_is_0(command, capfd):
    assert command(EASY, "--prompt_length", 4, "--steps", 200) == 0
    out, err = capfd.readouterr()
    assert "honest LCS  1.00, exact" in out
    assert "when pasted the same" in out
    assert err.startswith("N=4, step 0, best LCS")


def test_best_effort_is_3_and_json_is_all_there_is(command, capfd, tiny):
    assert command(HARD, "--prompt_length", 3, "--steps", 2, "--json", "--dtype", "float64") == 3
    found = json.loads(capfd.readouterr().out)
    assert not found["exact"]
    assert found["prompt_length"] == 3
    assert list(say(tiny, found["prompt_ids"], 6)) == found["output_ids"]
    assert tiny.encode(found["prompt_text"]) == found["prompt_ids"]
    assert tiny.decode(found["output_ids"]) == found["output_text"]


@pytest.mark.parametrize("source", ["stdin", "dash", "file"])
def test_the_text_can_come_from_elsewhere(command, capfd, monkeypatch, tmp_path, source):
    (tmp_path / "text.txt").write_text("w3  w4\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w3  w4\n")))
    arguments = {"stdin": [], "dash": ["-"], "file": ["--file", "text.txt"]}[source]
    command(*arguments, "--prompt_length", 2, "--steps", 1, "--json")
    assert json.loads(capfd.readouterr().out)["text"] == "w3  w4"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([" "], "Expected TEXT to hold a text, but it is empty."),
        (["--file", "absent"], "Expected `--file` to be a readable file, but got absent"),
        (["w1", "--file", "absent"], "Expected TEXT or `--file`, but got both."),
        (["-"], "Expected stdin to be UTF-8"),
        (["w1", "--method", "Magic"], "Expected `method` to be one of ADC"),
        (["w1", "--method", "PEZ", "--options", '{"tau": 1}'], "options of PEZ"),
        (["w1", "--prompt_length", "0"], "Expected `prompt_length` to be at least 1, but got 0."),
        (["w1", "--prompt_length", "some"], "prompt_length"),
        (["w1", "--seconds", "-1"], "Expected `seconds` to be positive, but got -1.0."),
        (["w1", "--allowed_tokens", "nice"], "allowed_tokens` to be one of all"),
    ],
)
def test_mistakes_are_one_line(command, capfd, monkeypatch, arguments, line):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert command(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("dlmi: error: ")
    assert err.count("\n") == 1
    assert line in err


def test_ctrl_c_prints_the_best_so_far(model_folder, tmp_path):
    # No budget that it could meet before the signal.
    flags = ["--lm", model_folder(), "--prompt_length", "3", "--steps", "100000000", "--json"]
    process = start(["invert", HARD, *flags], tmp_path)
    assert process.stderr.readline().startswith("N=3, step 0")
    process.send_signal(signal.SIGINT)
    out, _ = finish(process, exit_code=3)
    found = json.loads(out)
    assert found["interrupted"]
    assert len(found["prompt_ids"]) == 3


def test_a_second_ctrl_c_stops_at_once(tiny):
    def press(progress):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        invert(tiny, HARD, prompt_length=3, steps=4, on_progress=press)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_python_gives_the_best_so_far(tiny):
    seen = []

    def press_once(progress):
        seen.append(progress)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)

    found = invert(tiny, HARD, steps=400, on_progress=press_once)
    assert found.interrupted
    assert found.row.steps == 1
    assert found.prompt_length == AUTO_LENGTHS[0]


# ---- text that no one should trust


def test_hostile_text_is_shown_and_does_nothing(monkeypatch, capfd):
    evil = "\x1b]0;evil\x07[bold]<b>&"
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<eos>", "<bos>", evil])}
    vocabulary |= {f"w{i}": i for i in range(4, 31)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "eos_token": "<eos>", "bos_token": "<bos>"}
    hostile = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("llama"))
    seen = []
    found = invert((model, hostile), evil, prompt_length=4, on_progress=seen.append, **FAST)
    assert found.exact
    assert found.output_text == evil

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    lm = FrozenLM(model, hostile)
    with SearchScreen(lm) as screen:
        screen.show(seen[-1])
    print_found(lm, found)
    for shown in capfd.readouterr():
        assert "\x1b]0;evil" not in shown
        assert "\x07" not in shown
        assert "\\x1b]0;evil\\x07[bold]<b>&" in shown

    page = found._repr_html_()
    assert "<b>" not in page
    assert "\x1b" not in page
    assert "\\x1b]0;evil\\x07[bold]&lt;b&gt;&amp;" in page


def test_html_marks_what_is_wrong(tiny):
    found = invert(tiny, HARD, prompt_length=3, steps=2)
    assert 0 < found.lcs < 1
    wrong = len(found.output_ids) - round(found.lcs * len(found.output_ids))
    assert found._repr_html_().count("<del") == wrong
