"""Fixed tokens around a prompt: contexts, and the templates that they are made from."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlmi import InputError, load_lm
from dlmi.targets.context import Context
from dlmi.targets.files import read_targets, write_targets
from dlmi.targets.target import Target, share_prefix
from dlmi.targets.template import Template
from dlmi.tokens.round_trip import round_trips
from dlmi.tokens.vocabulary import Vocabulary

# Beginnings that are partly shared, pieces of different number of tokens, one and two blanks.
CONTEXTS = [
    Context(((3, 4, 5), (6,))),
    Context(((3, 4), ())),
    Context(((3, 4, 9, 8), (7, 7), (10, 11, 12)), (2, 0)),
    Context(((3, 4, 5), (6, 8), ()), (0, 0)),
    Context(),
]
TARGETS = [(13, 14, 15), (16, 17), (18,), (19, 20, 21, 22), (23, 24)]


def targets_in_context():
    pairs = enumerate(zip(CONTEXTS, TARGETS, strict=True))
    return share_prefix([Target.single(f"t{i}", ids, "", context) for i, (context, ids) in pairs])


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
    for options in ({"pieces": ((),)}, {"blank_lengths": (-1,)}, {"read_once": 1}):
        with pytest.raises(InputError, match="context"):
            Context(**options)


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
        ("Q: {slot}\nA:", " a", "no ' ' before `{slot}`"),
        ("Q:{slot}\nA: ", "a", "Move a space"),
        ("Q:{slot}\n", "\n\na", "Move a space or a new line"),
    ],
)
def test_what_cannot_keep_its_tokens_is_refused(gpt, template, target, told):
    with pytest.raises(InputError, match=told):
        Template(template).fill(gpt, {}, "line 1").continuation_ids(gpt, target, "line 1")


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
    assert round_trips(gpt, prompt_ids[0].tolist())
    assert not tokens.round_trips(prompt_ids[0].tolist())
    assert tokens.round_trips(tokens.repaired(prompt_ids)[0].tolist())


def test_prompts_go_in_as_ids_or_as_text(gpt):
    template = Template("Q: {q}\nA:{slot}\n:")
    before, after = gpt.encode("Q: a{slot}\nA:"), gpt.encode("\n:")
    assert template.ids(gpt, {"q": "a{slot}"}, [3, 4], "") == [*before, 3, 4, *after]
    assert template.ids(gpt, {"q": "a"}, " b", "") == gpt.encode("Q: a\nA: b\n:")
    assert template.ids(gpt, {"q": "a"}, "", "") == gpt.encode("Q: a\nA:\n:")
    with pytest.raises(InputError, match="`template` to have one `{slot}` for a prompt of text"):
        Template("{slot}{slot}", setting="template").ids(gpt, {}, "x", "")


# ---- chats


def test_a_chat_is_what_the_tokenizer_makes_of_the_message(tiny, monkeypatch):
    template = Template("w1 {slot} w2", chat=True)
    with pytest.raises(InputError, match="has none. Write the marks"):
        template.fill(tiny, {}, "")
    turns = "{% for m in messages %}w9 {{ m.content }} w8 {% endfor %}"
    reply = "{% if add_generation_prompt %}w7{% endif %}"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", turns + reply)
    context = template.fill(tiny, {}, "").context
    assert context.pieces == (tuple(tiny.encode("w9 w1")), tuple(tiny.encode("w2 w8 w7")))
    assert (context.template, context.chat) == ("w1 {slot} w2", True)
    assert template.ids(tiny, {}, "w3", "") == tiny.encode("w9 w1 w3 w2 w8 w7")
    monkeypatch.setattr(tiny.tokenizer, "chat_template", turns + turns)
    with pytest.raises(InputError, match="keep each `{slot}`.*1 became 2"):
        template.fill(tiny, {}, "")
