"""What a target bars from its prompt: its own tokens, what reads alike, and near-copies."""

import random
import re

import pytest
from helpers.tiny_models import make_config
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dlmi import FrozenLM, Target, load_lm
from dlmi.tokens.forbidden import Forbidden


def lm_of(*pieces):
    """An LM whose tokens are these texts, which are put together without spaces."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<eos>", "<bos>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    names = {"unk_token": "<unk>", "eos_token": "<eos>", "bos_token": "<bos>"}
    config = make_config("llama")
    config.vocab_size = len(vocabulary)
    model = AutoModelForCausalLM.from_config(config)
    return FrozenLM(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names))


def barred(kind, target, *pieces):
    """Texts that a target of some pieces bars from a vocabulary of these and others."""
    lm = lm_of(*dict.fromkeys([*target, *pieces]))
    ids = lm.prompt_token_ids.tolist()
    target = Target.single("t", [lm.tokenizer.get_vocab()[piece] for piece in target], "")
    return {lm.decode([ids[column]]) for column in Forbidden(lm, ids, kind).columns(target)}


@pytest.mark.parametrize(
    ("target", "near", "others"),
    [
        (["company"], {" companies", "accompany", " Pan", "COMP"}, {" co", "pa", "comcast", "nap"}),
        ([" out", "fit"], {" fitted", "outs", "fits", "utf", "\nOut"}, {"f i t", "foto", "u"}),
        ([" bare", "\ufffd"], {"BARE", "barely", "are", "(are)"}, {"\ufffd9", " ba"}),
        (["the", " x1"], {" The", "X1"}, {"then", "other"}),  # a word of three letters has no stem
    ],
)
def test_near_copies(target, near, others):
    assert barred("stems", target, *near, *others) == {*target, *near}


def test_each_kind_bars_what_the_one_before_it_bars():
    pieces = [" Cats", "cats", "CAT", "category", "dog", "\n", " "]
    found = [barred(kind, ["cats", "\n"], *pieces) for kind in ("none", "ids", "words", "stems")]
    assert found[0] == set()
    assert found[1] == {"cats", "\n"}
    assert found[2] == {"cats", "\n", " Cats", " "}
    assert found[3] == {"cats", "\n", " Cats", " ", "CAT", "category"}


def longest_run(a, b):
    runs = [a[i:j] for i in range(len(a)) for j in range(i + 1, len(a) + 1)]
    return max((len(run) for run in runs if run in b), default=0)


def test_stems_follow_their_definition():
    rng = random.Random(0)
    pieces = {"".join(rng.choices("abc", k=rng.randint(1, 12))) for _ in range(300)}
    for target in ("abcabba", "cab", "ccba", "bacbacbbcaabcb"):
        near = {target}
        for piece in pieces if len(target) >= 4 else ():
            run = longest_run(piece, target)
            if run >= 3 and 2 * run >= min(len(piece), len(target)):
                near.add(piece)
        assert barred("stems", [target], *pieces) == near


@pytest.mark.real
def test_near_copies_in_the_packaged_vocabulary():
    smollm = load_lm()
    forbidden = Forbidden(smollm, smollm.prompt_token_ids.tolist(), "stems")
    target = Target.single("t", smollm.encode(" The company has an outfit"), "")
    texts = {smollm.decode([column]) for column in forbidden.columns(target)}
    assert {" companies", " fitted", "outs", "fits", " Company", "The"} <= texts
    assert not any(re.search("house|river|green", text) for text in texts)
