"""One text, one call or one command: what it finds, what it says, and how it ends."""

import ast
import dataclasses
import inspect
import io
import itertools
import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from helpers.subprocess_runs import finish, start
from helpers.tiny_models import make_config, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dlmi import InputError, Inversion, Inverter, Progress, TargetDataModule, invert
from dlmi.cli.main import main
from dlmi.invert_text.methods import named_method, starting_from
from dlmi.invert_text.screen import own_words, print_found, search_screen, shell_quoted
from dlmi.invert_text.search import AUTO_LENGTHS
from dlmi.methods import DLMI, GCG, PEZ, SwapSearch
from dlmi.methods.base import settings_of
from dlmi.methods.slot import Slot
from dlmi.targets.files import texts_to_targets
from dlmi.tokens.vocabulary import Vocabulary

EASY = "w9 w9"  # four tokens suffice
LONGER = "w11 w22"  # four do not, within these steps
HARD = "w1 w2 w9 w9 w9 w8"
KEPT_OUT = {"allowed_tokens": "round_trip", "forbid_target_tokens": "stems"}  # by default


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
    row = invert(tiny, EASY, prompt_length=4, steps=60)
    assert isinstance(row, Inversion)
    assert row.exact
    assert row.round_trips
    assert row.lcs == row.round_trip_lcs == 1
    assert row.target_text == row.output_text == EASY
    assert say(tiny, row.prompt_ids, 2) == row.target_ids
    assert say(tiny, tiny.encode(row.prompt_text), 2) == row.target_ids
    assert (row.stop_reason, row.method, len(row.prompt_ids)) == ("solved", "SwapSearch", 4)
    assert capfd.readouterr() == ("", "")


def test_it_finds_what_a_run_finds(tiny, fit):
    row = invert(tiny, HARD, prompt_length=4, steps=3, seed=2)
    run = Inverter(SwapSearch(), prompt_length=4, steps=3, **KEPT_OUT, seed=2)
    [target] = texts_to_targets(tiny, [HARD])
    start = dataclasses.replace(target, id="text_0#0")
    [other] = fit(run, TargetDataModule.of(tiny, [start])).values()
    for name in ("target_id", "prompt_ids", "steps", "settings", "forward_tokens", "target_set"):
        assert getattr(row, name) == getattr(other, name)


def test_the_same_seed_finds_the_same_prompt(tiny):
    few = {"prompt_length": 4, "steps": 2}
    prompts = [invert(tiny, HARD, seed=seed, **few).prompt_ids for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_auto_grows_until_a_length_works_and_then_shrinks(tiny):
    seen: list[Progress] = []
    row = invert(tiny, LONGER, steps=80, on_progress=seen.append)
    assert row.exact
    tried = [length for length, _ in itertools.groupby(p.prompt_length for p in seen)]
    found = max(tried)
    assert found in AUTO_LENGTHS[1:]
    grown = AUTO_LENGTHS[: AUTO_LENGTHS.index(found) + 1]
    assert tried == [*grown, *range(found - 1, tried[-1] - 1, -1)]
    assert tried[-1] < found
    assert len(row.prompt_ids) in (tried[-1], tried[-1] + 1)  # the last one may have failed
    assert max(p.step for p in seen if p.prompt_length == 4) == 80 // len(AUTO_LENGTHS)
    assert 80 // len(AUTO_LENGTHS) < row.steps <= 80  # of all lengths
    assert row.seconds >= next(p.seconds for p in seen if p.exact)  # since the search began
    assert say(tiny, row.prompt_ids, 2) == row.target_ids


def test_a_search_starts_from_a_prompt_of_another_length(tiny):
    [target] = texts_to_targets(tiny, [HARD])
    tokens = Vocabulary(tiny).for_target(target, 0)
    parts = {"target": target, "examples": target.examples, "tokens": tokens, "params": {}}
    found = {target.id: (5, 6, 7)}

    def starts(method, length, found=found):
        rng = torch.Generator().manual_seed(0)
        return starting_from(method, found).starts(Slot(**parts, length=length, rng=rng)).tolist()

    search = SwapSearch(num_starts=2)
    longer, own = starts(search, 5), starts(search, 5, {})
    assert longer == [[*ids[:2], 5, 6, 7] for ids in own]
    assert starts(search, 2) == [[6, 7], [5, 7], [5, 6]]
    assert starts(search, 1) == [[7], [5]]
    other = starting_from(GCG(topk=3), found)
    assert (type(other).__name__, settings_of(other)) == ("GCG", settings_of(GCG(topk=3)))
    relaxation = PEZ()
    assert starting_from(relaxation, found) is relaxation


def test_a_given_length_is_kept(tiny):
    assert len(invert(tiny, EASY, steps=200, prompt_length=6).prompt_ids) == 6


def test_a_template_leaves_room_for_fewer_lengths(tiny):
    seen: list[Progress] = []
    template = "w5 " * 50 + "{slot}"  # of 64 positions
    row = invert(tiny, "w3 w4", steps=2, template=template, on_progress=seen.append)
    assert {progress.prompt_length for progress in seen} == {4, 8}
    assert row.full_text.endswith(row.prompt_text)
    assert len(row.full_ids) == 50 + len(row.prompt_ids)


def test_texts_are_inverted_side_by_side_and_stay_in_order(tiny):
    seen: list[Progress] = []
    texts = [HARD, "w9", "w9"]
    rows = invert(tiny, texts, on_progress=seen.append, prompt_length=4, steps=16)
    assert [row.target_text for row in rows] == texts
    assert [row.exact for row in rows] == [False, True, True]
    assert [row.stop_reason for row in rows] == ["budget", "solved", "solved"]
    assert [row.target_id for row in rows] == ["text_0#0", "text_1#0", "text_2#0"]
    assert rows[0].steps == 16 > rows[1].steps
    hard = [progress for progress in seen if progress.text == HARD]
    assert [p.lcs for p in hard] == sorted(p.lcs for p in hard)  # best so far
    assert hard[-1].prompt_ids == rows[0].prompt_ids
    assert {progress.text for progress in seen[:3]} == set(texts)


def test_the_first_exact_start_ends_the_others(tiny):
    options = {"prompt_length": 4, "steps": 60, "seed": 3}
    alone = invert(tiny, EASY, **options)
    seen: list[Progress] = []
    row = invert(tiny, EASY, restarts=3, on_progress=seen.append, **options)
    assert alone.exact
    assert row.exact
    assert row.steps < alone.steps  # another than the first of the three, which is that one
    assert max(progress.step for progress in seen) == row.steps


def test_the_best_of_the_starts_counts_where_none_is_exact(tiny):
    options = {"prompt_length": 3, "steps": 1, "seed": 2}
    first, best = (invert(tiny, HARD, restarts=restarts, **options) for restarts in (1, 3))
    assert first.lcs < best.lcs < 1
    assert (first.target_id, best.target_id) == ("text_0#0", "text_0#1")


def test_time_ends_a_search(tiny):
    row = invert(tiny, HARD, seconds=1e-9)
    assert not row.exact
    assert row.stop_reason == "budget"
    assert row.steps == 1  # at the first length, and no other is begun
    assert len(row.prompt_ids) == AUTO_LENGTHS[0]


def test_a_pair_of_transformers_objects_and_another_method():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("llama"))
    pair = model, make_tokenizer()
    method = GCG(search_width=8, topk=4)
    row = invert(pair, HARD, prompt_length=3, steps=2, method=method, restarts=2)
    assert (row.method, row.model) == ("GCG", "unnamed")
    ids = torch.tensor([row.prompt_ids])
    for _ in row.output_ids:
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tuple(ids[0, 3:].tolist()) == row.output_ids


def test_a_name_is_set_for_small_budgets_and_an_object_is_taken_as_it_is():
    small = GCG(search_width=64, topk=64, buffer_size=0)
    assert named_method("GCG", {}) == (small, 4)
    changed = GCG(search_width=9, topk=64, buffer_size=0, loss="hinge")
    assert named_method("GCG", {"search_width": 9, "loss": "hinge"}) == (changed, 4)
    assert named_method("DLMI", {}) == (DLMI(tau0=1.0, num_samples=1, lr=0.3), 4)
    assert named_method("PEZ", {}) == (PEZ(), 4)
    assert named_method("SwapSearch", {}) == (SwapSearch(), None)
    assert named_method(GCG(), {}) == (GCG(), None)


def test_prompts_without_the_words_of_the_text(tiny):
    row = invert(tiny, HARD, prompt_length=8, steps=3, forbid_target_tokens="ids")
    assert not set(row.prompt_ids) & set(row.target_ids)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"text": []}, "at least one text"),
        ({"text": ["w1", ""]}, "`text\\[1\\]` to be a text"),
        ({"lm": 3}, "a pair \\(model, tokenizer\\), but got int"),
        ({"seconds": 0}, "`seconds` to be positive"),
        ({"options": {"temperature": 1}}, "options of SwapSearch .*but got 'temperature'"),
        ({"options": {"width": "x"}}, "to fit SwapSearch: expected `int`.*at `width`"),
        ({"options": {"width": 0}}, "to fit SwapSearch: expected `width` to be at least 1"),
        ({"fluency": -1.0}, "Expected `fluency` to be at least 0"),
        ({"text": ""}, "Expected `text` to be a text"),
        ({"method": PEZ(), "options": {"lr": 1.0}}, "only with the name of a method"),
        ({"method": "Refined"}, "`method` to be one of ADC"),
        ({"prompt_length": 63}, "at most 64"),
        ({"template": "{slot} {question}"}, "{question} is a field"),
        ({"text": "w1 hello"}, "made of tokens of .* turns 'w1 hello' into 'w1 <unk>'"),
    ],
)
def test_what_cannot_be_is_refused(tiny, changes, line):
    with pytest.raises(InputError, match=line):
        invert(**{"lm": tiny, "text": EASY, "steps": 1, **changes})


# ---- on the command line


def test_solved_is_0(command, capfd):
    assert command(EASY, "--prompt_length", 4, "--steps", 200) == 0
    out, err = capfd.readouterr()
    assert "honest LCS    1.00, exact" in out
    assert "when pasted   the same" in out
    assert "own words     none" in out
    loading, copying, state, *_ = err.splitlines()
    assert loading.startswith("loading ")
    assert copying == "the text itself, up to 3 times over, does not work as a prompt"
    assert state.startswith("N=4, step 0, best LCS")
    assert "try next" not in err


def test_it_says_when_the_text_itself_works_and_which_words_a_prompt_holds(tiny, command, capfd):
    words = [tiny.decode([i]) for i in range(3, 31)]
    word = next(w for w in words if say(tiny, tiny.encode(w), 1) == tuple(tiny.encode(w)))
    assert command(word, "--prompt_length", 1, "--steps", 1, "--json") == 0
    out, err = capfd.readouterr()
    assert "the text itself works as a prompt; looking for another" in err
    row = Inversion.from_json(json.loads(out))
    print_found(dataclasses.replace(row, prompt_text=f"w0 {word}"))
    assert f"own words     {word}" in capfd.readouterr().out


def test_what_is_printed_can_be_pasted(tiny, command, capfd, tmp_path):
    flags = ["--prompt_length", 3, "--steps", 2, "--template", "w5 w6 {slot}"]
    command(HARD, *flags, "--save", tmp_path / "prompt.txt")
    lines = dict(re.split("  +", line, maxsplit=1) for line in capfd.readouterr().out.splitlines())
    whole = ast.literal_eval(lines["whole prompt"])
    assert ast.literal_eval(lines["prompt"]) in whole
    assert pasted(lines["in a shell"]) == whole
    assert (tmp_path / "prompt.txt").read_bytes() == whole.encode()
    said = "".join(tiny.decode([i]) for i in say(tiny, tiny.encode(whole), 6))
    assert (lines["when pasted"] == "the same") == (f'"{said}"' == lines["the LM says"])


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_template_can_come_from_a_file(command, capfd, tmp_path, suffix):
    texts = {"json": '"w5 {slot}"', "yaml": "|-\n  w5 {slot}"}
    (tmp_path / f"t.{suffix}").write_text(texts[suffix])
    command(HARD, "--prompt_length", 3, "--steps", 1, "--template", f"t.{suffix}", "--json")
    row = Inversion.from_json(json.loads(capfd.readouterr().out))
    assert row.context.template == "w5 {slot}"
    (tmp_path / f"t.{suffix}").unlink()
    assert command(HARD, "--template", f"t.{suffix}") == 2


def test_a_template_may_be_messages(command, capfd):
    messages = '[{"role": "user", "content": "w5 {slot}"}]'
    assert command(HARD, "--template", messages) == 2
    assert "has a chat template" in capfd.readouterr().err  # the tiny LM's has none


def pasted(shell_line):
    """What bash makes of it."""
    script = f"printf %s {shell_line}"
    return subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode()


@pytest.mark.parametrize(
    "text",
    [
        " a",
        "it's",
        "\xa0 \u202e",
        "$HOME `id` !! \\n",
        "a\nb\t'\x1b[31m\x07'",
        "\x7f0 é 日本 \\x41\r",
    ],
)
def test_any_text_can_be_pasted_into_a_shell(text):
    line = shell_quoted(text)
    assert line.isprintable()
    assert pasted(line) == text


def test_a_failure_says_what_to_try_next(command, capfd):
    assert command(HARD, "--prompt_length", 3, "--steps", 1) == 3
    err = capfd.readouterr().err
    assert "Not found. What to try next:" in err
    for tip in ("--steps 5 ", "--prompt_length 6", "--forbid_target_tokens none", '" w1 w2'):
        assert tip in err
    assert "--seconds" not in err


@pytest.mark.parametrize(
    ("text", "tokens", "found"),
    [
        (" Berlin.", [" heim", "er", "lyn"], []),  # none of its tokens is near
        (" Berlin.", [" Ber", "ths"], ["ber"]),
        (" Berlin.", [" b", "erl", "in"], ["berlin", "erl"]),
        (" the fox", [" The", " foxes"], ["the"]),  # words of three letters have no stem
    ],
)
def test_own_words_follow_the_rule_of_stems(text, tokens, found):
    assert own_words(text, "".join(tokens), tokens) == found


def test_the_example_of_the_help_fits_the_default_method():
    example = re.search(r"'(\{.*?\})'", invert.__doc__)
    named_method(inspect.signature(invert).parameters["method"].default, json.loads(example[1]))


def test_best_effort_is_3_and_json_is_all_there_is(command, capfd, tiny):
    flags = ["--method", "GCG", "--options", '{"search_width": 8, "topk": 4}']
    flags += ["--prompt_length", 3, "--steps", 2, "--dtype", "float64", "--chat", "false"]
    assert command(HARD, *flags, "--json") == 3
    row = Inversion.from_json(json.loads(capfd.readouterr().out))
    assert not row.exact
    assert (row.method, row.dtype, row.settings["search_width"]) == ("GCG", "float64", 8)
    assert row.settings["buffer_size"] == 0  # for small budgets
    assert len(row.prompt_ids) == 3
    assert say(tiny, row.prompt_ids, 6) == row.output_ids
    assert tiny.encode(row.prompt_text) == list(row.prompt_ids)
    assert tiny.decode(row.output_ids) == row.output_text


@pytest.mark.parametrize("source", ["stdin", "dash", "file"])
def test_the_text_can_come_from_elsewhere(command, capfd, monkeypatch, tmp_path, source):
    (tmp_path / "text.txt").write_text("w3  w4\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w3  w4\n")))
    arguments = {"stdin": [], "dash": ["-"], "file": ["--file", "text.txt"]}[source]
    command(*arguments, "--prompt_length", 2, "--steps", 1, "--json")
    assert json.loads(capfd.readouterr().out)["target_text"] == "w3  w4"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([" "], "Expected TEXT to hold a text, but it is empty."),
        (["--file", "absent"], "Expected `--file` to be readable UTF-8, but it is not ([Errno 2]"),
        (["w1", "--save", "/"], "Expected `--save` to be a new file"),
        (["w1", "--template", "{slot} w2{x}"], "Expected `template` to hold"),
        (["w1", "--file", "absent"], "Expected TEXT or `--file`, but got both."),
        (["-"], "Expected stdin to be readable UTF-8"),
        (["w1", "--method", "Magic"], "Expected `method` to be one of ADC"),
        (["w1", "--method", "PEZ", "--options", '{"tau": 1}'], "options of PEZ"),
        (["w1", "--prompt_length", "0"], "Expected `prompt_length` to be at least 1, but got 0."),
        (["w1", "--prompt_length", "some"], "prompt_length"),
        (["w1", "--seconds", "-1"], "Expected `seconds` to be positive, but got -1.0."),
        (["w1", "--allowed_tokens", "nice"], "Expected `allowed_tokens` to be one of all"),
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
    for start_of_line in ("loading", "the text itself", "N=3, step 0"):
        assert process.stderr.readline().startswith(start_of_line)
    process.send_signal(signal.SIGINT)
    out, err = finish(process, exit_code=3)
    assert "stopping after this step; Ctrl-C again stops at once" in err
    row = json.loads(out)
    assert row["stop_reason"] == "interrupted"
    assert len(row["prompt_ids"]) == 3


def test_a_second_ctrl_c_stops_at_once(tiny):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

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

    row = invert(tiny, HARD, steps=400, on_progress=press_once)
    assert row.stop_reason == "interrupted"
    assert row.steps == 1
    assert len(row.prompt_ids) == AUTO_LENGTHS[0]


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
    seen: list[Progress] = []
    options = {"prompt_length": 4, "steps": 60, "on_progress": seen.append}
    row = invert((model, hostile), evil, **options)
    assert row.exact
    assert row.output_text == evil

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with search_screen() as show:
        show(seen[-1])
    print_found(row)
    for shown in capfd.readouterr():
        assert "\x1b]0;evil" not in shown
        assert "\x07" not in shown
        assert "\\x1b]0;evil\\x07[bold]<b>&" in shown

    page = row._repr_html_()
    assert "<b>" not in page
    assert "\x1b" not in page
    assert "\\x1b]0;evil\\x07[bold]&lt;b&gt;&amp;" in page


def test_html_marks_what_is_wrong(tiny):
    row = invert(tiny, HARD, prompt_length=3, steps=2)
    assert 0 < row.lcs < 1
    wrong = len(row.output_ids) - round(row.lcs * len(row.output_ids))
    assert row._repr_html_().count("<del") == wrong
