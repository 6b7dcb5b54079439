"""Targets: one example or many, their files and fingerprints, and where they come from."""

import dataclasses
import json
from pathlib import Path

import pytest

from dlmi import InputError
from dlmi.jsonl import build
from dlmi.targets.context import Context, Reasoning
from dlmi.targets.sources import ByRank, File, Questions, Sharing, Texts
from dlmi.targets.target import (
    Target,
    fingerprint_targets,
    share_prefix,
    share_prompt,
    split,
    with_start_ids,
)
from dlmi.targets.template import Template

REPRODUCTION = Path(__file__).parents[2] / "docs" / "reproduction" / "targets.jsonl"
CONTEXT = Context(((3, 4), (7, 7), (10,)), (2, 0), template="t", reasoning=Reasoning(9, "!", (5,)))
A, B, C = (Target.single(name, (1, 2, i), name.upper(), CONTEXT) for i, name in enumerate("abc"))
SHARED = share_prompt([A, B], 2, 1, [C])
# As commit b7e9a4c wrote them.
OLD_FRAME = {
    "pieces": [[3, 4], [7, 7], [10]],
    "slot_lengths": [2, 0],
    "head": 0,
    "template": "t",
    "chat": False,
    "reasoning": {"max_tokens": 9, "trigger": "!", "trigger_ids": [5]},
}
OLD_EXAMPLES = [
    {"id": name, "ids": [1, 2, i], "text": name.upper(), "frame": OLD_FRAME}
    for i, name in enumerate("abc")
]


def test_a_target_of_one_example():
    target = Target.single("t", [5, 6], "five six", k=3)
    [example] = target.examples
    assert (example.id, target.ids, target.text, target.k) == ("t", (5, 6), "five six", 3)
    assert not target.is_shared
    assert not target.reasons
    assert target.measured == target.all_examples == target.minibatch(7, 0) == (example,)
    assert target.longest_row(10) == 12


def test_a_target_of_many():
    assert SHARED.is_shared
    assert SHARED.reasons
    assert [example.id for example in SHARED.all_examples] == ["a", "b", "c"]
    assert (SHARED.ids, SHARED.text) == (A.ids, "A")  # what an evaluation reads
    assert split(SHARED.examples, range(6)) == [(0, 1, 2), (3, 4, 5)]
    [started] = with_start_ids([SHARED], [0])
    assert started.longest_row(10) == SHARED.longest_row(10) + 1 == 1 + 10 + 5 + 9 + 1 + 3


@pytest.mark.parametrize(("field", "value"), [("per_step", 0), ("evaluated", 0), ("examples", [])])
def test_counts_of_a_target_are_at_least_one(field, value):
    with pytest.raises(InputError, match=f"`{field}`"):
        Target.from_json({**SHARED.to_json(), field: value})


def test_minibatches_are_those_of_earlier_versions():
    """Recorded from commit b7e9a4c."""
    target = share_prompt([Target.single(f"e{i}", (i,), "") for i in range(7)], 3)
    key = 6111694510332212331
    batches = ["".join(e.id[1] for e in target.minibatch(step, key)) for step in range(6)]
    assert batches == ["215", "346", "030", "514", "262", "306"]
    assert len(dataclasses.replace(target, per_step=9).minibatch(0, key)) == 7


# ---- files and fingerprints


def test_fingerprints_are_those_of_earlier_versions():
    """Recorded from commit b7e9a4c; neither the start nor what is read once counts."""
    rows = [json.loads(line) for line in REPRODUCTION.read_text().splitlines()]
    targets = [Target.from_json(row) for row in rows]
    plain = [Target.single("a", (1, 2), ""), Target.single("b", (3,), "")]
    everything = [
        (targets, "c1a9bd671c3c2c7e"),
        (plain, "f81755a7dfa7667f"),
        ([A, B], "3f608202f62285a4"),
        ([SHARED], "a13b355ee7a15979"),
        ([share_prompt([A, B, C], 2)], "e94dbd72fbc2a14c"),
    ]
    for made, fingerprint in everything:
        assert fingerprint_targets(made) == fingerprint
        assert fingerprint_targets(with_start_ids(share_prefix(made), [0])) == fingerprint
    assert [json.loads(json.dumps(target.to_json())) for target in targets] == rows


@pytest.mark.parametrize(
    "target",
    [
        A,
        SHARED,
        *with_start_ids(share_prefix([A, SHARED]), [0]),
        dataclasses.replace(A, group="a"),
        dataclasses.replace(A, id="other"),
        Target.single("t", (1,), "", k=1, ranks=(1,), probabilities=(0.1 + 0.2,), perplexity=1.1),
    ],
)
def test_json_gives_the_same_target_back(target):
    assert Target.from_json(json.loads(json.dumps(target.to_json()))) == target


def test_targets_of_earlier_versions_are_read():
    a, b, c = OLD_EXAMPLES
    assert Target.from_json(a) == A
    shared = {"pool": [a, b], "per_step": 2, "held_out": [c]}
    row = {"id": "shared", "ids": [1, 2, 0], "text": "A", "examples": [a], "shared": shared}
    assert Target.from_json(row) == SHARED


@pytest.mark.parametrize(
    "row",
    [
        {"id": "t", "examples": []},
        {"id": "t", "examples": 3},
        {"id": "t", "examples": [3]},
        {"id": "t", "examples": [{"id": "e"}]},
        {"id": "t", "ids": [1], "text": "", "context": [1]},
        {"id": "t", "ids": [1], "text": "", "frame": {"pieces": 3}},
        {"id": "t", "ids": [1], "text": "", "context": {"read_once": 3}},
        {"id": "t", "ids": [1], "text": "", "shared": {}},
        {"id": "t", "ids": [1], "text": "", "shared": {"pool": 3}},
    ],
)
def test_what_is_no_target_is_refused(row):
    with pytest.raises(InputError):
        Target.from_json(row)


def test_a_common_beginning_is_read_once():
    firsts = [(3, 4, 5), (3, 4), (3, 4, 9)]
    targets = [Target.single(str(i), (1,), "", Context((f, ()))) for i, f in enumerate(firsts)]
    marked = with_start_ids(share_prefix(targets), [2])
    contexts = [target.examples[0].context for target in marked]
    assert {context.read_once for context in contexts} == {2}
    assert {context.prefix_ids for context in contexts} == {(2, 3, 4)}
    assert [t.examples[0].tokens_read(10) for t in marked] == [11, 10, 11]


# ---- sources


def test_generated_targets_stand_in_a_template(tiny):
    source = ByRank((1, 3), per_k=2, length=4)
    plain = source.targets(tiny, None)
    assert len(plain) == 4
    for target, bare in zip(source.targets(tiny, Template("w1 {slot} w2")), plain, strict=True):
        assert target.ids == bare.ids
        assert target.examples[0].context.pieces == ((4,), (5,))
    with pytest.raises(InputError, match=r"fields of `data.template` \(name\), but got ByRank"):
        source.targets(tiny, Template("{name} {slot}"))


def test_texts_and_files(tiny, tmp_path):
    [target] = Texts(["w1 w2"]).targets(tiny, None)
    assert target == Target.single("text_0", (4, 5), "w1 w2")
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": " w1", "context": "w5"}\n')
    [target] = File(str(path)).targets(tiny, Template("{context} {slot}"))
    assert target.examples[0].context.pieces == (tuple(tiny.encode("w5")), ())
    with pytest.raises(InputError, match="`data.targets.path` to be a readable file"):
        File(str(tmp_path / "none.jsonl")).targets(tiny, None)


@pytest.mark.parametrize("reasoning_tokens", [None, 7])
def test_questions(tiny, tmp_path, reasoning_tokens):
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"w{i} ", "answer": f"w9\n#### w{i + 1}"} for i in (1, 2, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Questions(str(path), 2, " {final}", reasoning_tokens, trigger=r"\nw8")
    first, second = source.targets(tiny, Template("{question} {slot}"))
    assert [first.ids, second.ids] == [(5,), (6,)]
    assert first.examples[0].context.pieces == ((4,), ())
    reasoning = first.examples[0].context.reasoning
    assert reasoning == (None if reasoning_tokens is None else Reasoning(7, "\nw8", (11,)))
    for template in (None, Template("{slot}")):
        with pytest.raises(InputError, match=r"`data.template` with `\{question\}`"):
            source.targets(tiny, template)


def test_sharing_reads_what_is_held_out(tiny, tmp_path):
    path = tmp_path / "held_out.txt"
    path.write_text("w7\n")
    target = Sharing(1, None, str(path)).target(tiny, Texts(["w1", "w2"]).targets(tiny, None), None)
    assert [example.ids for example in target.all_examples] == [(4,), (5,), (10,)]
    assert (target.per_step, target.measured) == (1, target.examples)
    with pytest.raises(InputError, match="`data.share.held_out` to be unset"):
        Sharing(held_out=str(path)).target(tiny, [A], None)
    with pytest.raises(InputError, match="`data.share.held_out` to be a readable file"):
        Sharing(held_out="none.txt").target(tiny, [target], None)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ByRank(()), "targets.k"),
        (lambda: ByRank(per_k=0), "targets.per_k"),
        (lambda: ByRank(length=0), "targets.length"),
        (lambda: ByRank(sigma=-1.0), "targets.sigma"),
        (lambda: Texts([]), "targets.texts"),
        (lambda: Questions(limit=0), "targets.limit"),
        (lambda: Questions(reasoning_tokens=0), "targets.reasoning_tokens"),
        (lambda: Questions(answer="{slot}"), "targets.answer"),
        (lambda: Sharing(0), "share.per_step"),
        (lambda: Sharing(evaluated=0), "share.evaluated"),
    ],
)
def test_wrong_values_are_named(make, name):
    with pytest.raises(InputError, match=f"Expected `data.{name}`"):
        make()


# ---- result rows


def test_contexts_in_rows_are_those_of_the_run():
    for context in (CONTEXT, Context(), Context(((3, 4), ()), start_ids=(2,), read_once=1)):
        assert build(Context, json.loads(json.dumps(dataclasses.asdict(context)))) == context
