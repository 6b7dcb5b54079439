"""Fixed tokens around a prompt: contexts, and the templates that they are made from."""

import itertools
import json

import pytest
import torch
from helpers.contexts import CONTEXTS, targets_in_context
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlmi import InputError, load_lm
from dlmi.jsonl import build
from dlmi.targets.context import Context
from dlmi.targets.files import read_targets, write_targets
from dlmi.targets.sources import Texts
from dlmi.targets.target import Target
from dlmi.targets.template import Template
from dlmi.tokens.round_trip import round_trips
from dlmi.tokens.vocabulary import Vocabulary

# ---- contexts


def test_text_ids_positions_and_sizes_agree():
    for context, length in itertools.product(CONTEXTS, (3, 5, 8)):
        prompt_ids = list(range(100, 100 + length))
        text_ids = context.text_ids(prompt_ids)
        assert [text_ids[position] for position in context.positions(length)] == prompt_ids
        assert len(text_ids) == length + len(context.fixed_ids)
        assert sum(context.sizes(length)) == length


@pytest.mark.parametrize(
    ("lengths", "prompt_length"), [((3,), 5), ((3, 4), 6), ((3, 0), 3), ((0, 0), 1), ((6,), 5)]
)
def test_slots_that_cannot_hold_the_prompt_are_refused(lengths, prompt_length):
    context = Context(((),) * (len(lengths) + 1), lengths)
    with pytest.raises(InputError, match="model.prompt_length"):
        context.sizes(prompt_length)


def test_what_is_no_context_is_refused():
    for options in ({"pieces": ((),)}, {"blank_lengths": ()}, {"read_once": 1}):
        with pytest.raises(InputError, match="context"):
            Context(**options)
    for name, value in (("blank_lengths", [-1]), ("read_once", -1)):
        with pytest.raises(InputError, match=f">= 0 at `{name}"):
            build(Context, {name: value})


def test_targets_in_contexts_survive_a_file(tiny, tmp_path):
    targets = targets_in_context()
    write_targets(tmp_path / "t.jsonl", targets)
    assert read_targets(tiny, tmp_path / "t.jsonl") == targets


# ---- templates and tokens


@pytest.fixture(scope="module")
def gpt(model_folder, tmp_path_factory):
    """The tiny Llama with a tokenizer that reads spaces as GPT-2 does, and merges nothing else."""
    letters = [*"xabcQA:.\n<|>", "Ġ"]
    names = [letter.replace("\n", "Ċ") for letter in letters]
    pieces = ["<unk>", "<eos>", "<bos>", *names, *(f"Ġ{letter}" for letter in "xabc"), "ĊĊ"]
    merges = [*(("Ġ", letter) for letter in "xabc"), ("Ċ", "Ċ")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lm = load_lm(str(model_folder()), dtype="float64")
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    lm.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return lm


def test_pieces_are_read_as_in_the_final_text(gpt):
    filled = Template("Q: {q}\nA:{slot} b\n{slot:2}:").fill(gpt, {"q": "abc"}, "line 1")
    assert filled.context.pieces == tuple(
        tuple(gpt.encode(text)) for text in ("Q: abc\nA:", " b\n", ":")
    )
    assert filled.context.blank_lengths == (0, 2)
    text_ids = filled.context.text_ids([*gpt.encode(" x a"), *gpt.encode("x c")])
    assert gpt.encode("Q: abc\nA: x a b\nx c:") == list(text_ids)


@pytest.mark.parametrize(
    ("template", "target", "told"),
    [
        ("Q:\n\n{slot}\nA:", " a", r"no '\\n' before `{slot}`"),
        ("Q:{slot}\nA: ", "a", "Move a space"),
        ("Q:{slot}\n", "\n\na", "Move a space or a new line"),
    ],
)
def test_what_cannot_keep_its_tokens_is_refused(gpt, template, target, told):
    with pytest.raises(InputError, match=told):
        Template(template).fill(gpt, {}, "line 1").continuation_ids(gpt, target, "line 1")


def test_a_space_before_a_slot_is_left_to_the_prompt(gpt):
    spaced, close = (
        Template(t).fill(gpt, {}, "") for t in ("Q: {slot} {slot}:", "Q:{slot}{slot}:")
    )
    assert spaced.context.pieces == close.context.pieces
    assert spaced.context.template == "Q: {slot} {slot}:"


def test_a_target_has_the_tokens_that_follow_the_template(gpt):
    filled = Template("Q:{slot}\nA:").fill(gpt, {}, "line 1")
    assert filled.continuation_ids(gpt, " abc", "") == tuple(gpt.encode(" abc"))


@pytest.mark.parametrize(
    "template", ["no place", "{slot} {", "{slot} }", "{slot:0}", "{slot} {name:3}", "{slot} { a }"]
)
def test_what_is_no_template_is_refused(template):
    with pytest.raises(InputError, match="data.template"):
        Template(template)


def test_braces_and_fields(tiny):
    filled = Template("w1 {{w2}} {n} {slot}").fill(tiny, {"n": 3}, "")
    assert filled.context.pieces == ((4, *tiny.encode("{w2}"), *tiny.encode("3")), ())
    for values in ({}, {"n": None}, {"n": ["w1"]}):
        with pytest.raises(InputError, match="line 7 to have a text as `n`"):
            Template("{n} {slot}").fill(tiny, values, "line 7")


def test_prompts_are_repaired_together_with_what_is_around_them(gpt):
    """A space at the end of the blank would go to the letter after it."""
    context = Template("Q:{slot}a").fill(gpt, {}, "").context
    target = Target.single("t", (4,), "", context)
    tokens = Vocabulary(gpt, ["no_special", "round_trip"]).for_target(target, key=0)
    prompt_ids = torch.tensor([gpt.encode("x ")])
    assert round_trips(gpt, prompt_ids.tolist()) == [True]
    assert not tokens.round_trips(prompt_ids[0].tolist())
    assert tokens.round_trips(tokens.repaired(prompt_ids)[0].tolist())


def test_prompts_go_in_as_ids_or_as_text(gpt):
    template = Template("Q: {q}\nA:{slot}\n:")
    before, after = gpt.encode("Q: a{slot}\nA:"), gpt.encode("\n:")
    assert template.ids(gpt, {"q": "a{slot}"}, [3, 4], "") == [*before, 3, 4, *after]
    assert template.ids(gpt, {"q": "a"}, " b", "") == gpt.encode("Q: a\nA: b\n:")
    assert template.ids(gpt, {"q": "a"}, "", "") == gpt.encode("Q: a\nA:\n:")
    with pytest.raises(InputError, match="`template` to have one `{slot}` for a prompt of text"):
        Template("{slot}{slot}", setting="`template`").ids(gpt, {}, "x", "")


# ---- chats


@pytest.fixture
def chatting(tiny, monkeypatch):
    """The tiny LM with turns of a role and a message; the assistant's begins with w7."""
    turns = (
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools.') }}{% endif %}"
        "{{ {'system': 'w9', 'user': 'w8', 'assistant': 'w7'}[m.role] }} {{ m.content }} w6 "
        "{% endfor %}"
    )
    reply = "{% if add_generation_prompt %}w7{% endif %}"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", turns + reply)
    return tiny


def pieces_of(lm, *texts):
    return tuple(tuple(lm.encode(text)) for text in texts)


def test_a_chat_is_what_the_tokenizer_makes_of_the_message(chatting, monkeypatch):
    template = Template("w1 {slot} w2", chat=True)
    context = template.fill(chatting, {}, "").context
    assert context.pieces == pieces_of(chatting, "w8 w1", "w2 w6 w7")
    assert (context.template, context.chat) == ("w1 {slot} w2", True)
    assert template.ids(chatting, {}, "w3", "") == chatting.encode("w8 w1 w3 w2 w6 w7")
    monkeypatch.setattr(chatting.tokenizer, "chat_template", "{{ messages[0].content * 2 }}")
    with pytest.raises(InputError, match="keep each `{slot}`.*1 became 2"):
        template.fill(chatting, {}, "")
    monkeypatch.setattr(chatting.tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="has none. Write the marks"):
        template.fill(chatting, {}, "")


MESSAGES = [
    {"role": "system", "content": "w1 {name}"},
    {"role": "user", "content": "w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4 {slot}"},
]


@pytest.mark.parametrize("given", [MESSAGES, json.dumps(MESSAGES, indent=1)])
def test_a_chat_may_have_messages_of_its_own(chatting, given):
    template = Template(given)
    assert (template.fields, template.chat) == (["name"], True)
    context = template.fill(chatting, {"name": "w5"}, "").context
    before = "w9 w1 w5 w6 w8 w2 w6 w7 w3 w6 w8 w4"
    assert context.pieces == pieces_of(chatting, before, "w6 w7")
    again = Template(context.template).fill(chatting, {"name": "w5"}, "").context
    assert again.pieces == context.pieces


def test_a_chat_may_end_in_what_the_assistant_has_begun(chatting):
    begun = [*MESSAGES[1:2], {"role": "assistant", "content": "w1 {slot} w2"}]
    filled = Template(begun).fill(chatting, {}, "")
    assert filled.context.pieces == pieces_of(chatting, "w8 w2 w6 w7 w1", "w2")


@pytest.mark.parametrize(
    "given",
    [[], [{}], [["w1"]], [{"role": "user"}], [{"role": "user", "content": 3}], [*MESSAGES, 1]],
)
def test_what_are_no_messages_is_refused(given):
    for form in (given, json.dumps(given)):
        with pytest.raises(InputError, match="data.template"):
            Template(form)


def test_messages_that_the_tokenizer_refuses_are_refused(chatting):
    tool = Template([{"role": "tool", "content": "w1 {slot}"}])
    with pytest.raises(InputError, match="can write, but it says: no tools"):
        tool.fill(chatting, {}, "")


@pytest.mark.parametrize("text", ["[INST] {slot} [/INST]", "[{slot}]", '[{{"a"}}] {slot}'])
def test_a_text_may_look_like_a_list(text):
    assert not Template(text).chat


def test_a_line_may_have_a_template_of_its_own(chatting, tmp_path):
    lines = [
        {"text": " w10"},
        {"text": " w10", "template": "w5 {slot}", "chat": False},
        {"text": " w10", "chat": True},
        {"ids": [9, 10], "template": MESSAGES, "name": "w0"},
        {"text": " w10", "template": None, "chat": False},
        {"text": " w10", "template": None, "chat": True},
    ]
    path = tmp_path / "targets.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    targets = read_targets(chatting, path, Template("w1 {slot} w2"))
    found = [target.examples[0].context for target in targets]
    assert [context.pieces for context in found] == [
        pieces_of(chatting, *pieces)
        for pieces in (
            ("w1", "w2"),
            ("w5", ""),
            ("w8 w1", "w2 w6 w7"),
            ("w9 w1 w0 w6 w8 w2 w6 w7 w3 w6 w8 w4", "w6 w7"),
            ("", ""),
            ("w8", "w6 w7"),
        )
    ]
    in_place = Texts([{"id": f"line_{i}", **line} for i, line in enumerate(lines, 1)])
    assert in_place.targets(chatting, Template("w1 {slot} w2")) == targets
    write_targets(tmp_path / "again.jsonl", targets)
    assert read_targets(chatting, tmp_path / "again.jsonl") == targets
    for wrong, told in (
        ({"template": 3}, "a text or messages as `template`"),
        ({"chat": "yes"}, "true or false"),
        ({"template": "w1"}, "`template` in .*line 1 to have at least one"),
        ({"template": [{"role": "user"}]}, "`template` in .*line 1 to be a text, or a list"),
    ):
        path.write_text(json.dumps({"text": " w10", **wrong}) + "\n")
        with pytest.raises(InputError, match=told):
            read_targets(chatting, path)
