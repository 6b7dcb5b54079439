"""Which tokens a prompt may hold: the sets, what a target bars, and prompts that round-trip."""

import itertools

import pytest
import torch
from helpers.bpe_model import PIECES, ids_of, save_bpe_model

from dlmi import InputError, Target, Vocabulary, load_lm
from dlmi.targets.context import NO_CONTEXT
from dlmi.targets.template import Template
from dlmi.tokens.neighbours import echo_prompts
from dlmi.tokens.round_trip import round_trips
from dlmi.tokens.token_sets import check_allowed_tokens, select_tokens
from dlmi.tokens.vocabulary import token_sets_of


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    save_bpe_model(folder)
    return load_lm(str(folder), dtype="float64")


def target_of(*pieces):
    return Target.single("t", ids_of(*pieces), "")


# ---- the sets


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("all", ""),
        ("no_special", "<eos> <bos>"),
        ("ascii", "<eos> <bos> Ã © Ã©"),
        ("printable", "<eos> <bos> Ã © Ċ"),
        ("round_trip", "Ã ©"),
    ],
)
def test_named_sets(bpe, name, missing):
    left = Vocabulary(bpe, [name]).token_ids.tolist()
    assert {PIECES[i] for i in set(range(len(PIECES))) - set(left)} == set(missing.split())
    assert left == sorted(left)


def test_columns_stand_for_their_tokens(bpe):
    vocabulary = Vocabulary(bpe, ["ascii", "printable"])
    assert len(vocabulary) == 13
    columns = torch.arange(12).view(3, 4)
    ids = vocabulary.ids(columns)
    assert torch.equal(vocabulary.matrix[columns], bpe.embed(ids))
    assert torch.equal(vocabulary.columns(ids), columns)


def test_a_file_names_tokens_by_id_and_by_text(bpe, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text('5\n\nab\n a\r\n"\\n"\n"<eos>"\n\ufffd\n', encoding="utf-8")
    chosen = select_tokens(bpe, bpe.prompt_token_ids.tolist(), str(file))
    assert [PIECES[i] for i in chosen] == ["<eos>", "d", "Ċ", "Ã", "©", "ab", "Ġa"]


@pytest.mark.parametrize(
    "line", ["19", "-1", "zebra", '"5"', "9" * 5000, "[" * 100_000], ids=range(6)
)
def test_a_file_with_what_is_no_token_is_refused(bpe, tmp_path, line):
    file = tmp_path / "tokens.txt"
    file.write_text(f"a\n{line}\n")
    with pytest.raises(InputError, match="line 2.*but got"):
        Vocabulary(bpe, [str(file)])


def test_what_is_no_set_is_refused(bpe, tmp_path):
    with pytest.raises(InputError, match=r"`model.allowed_tokens`.*'asci'"):
        check_allowed_tokens("asci")
    file = tmp_path / "empty.txt"
    file.write_text("\n")
    with pytest.raises(InputError, match="leaves none"):
        Vocabulary(bpe, [str(file)])


# ---- what a target bars


@pytest.mark.parametrize(
    ("forbid", "barred"),
    [
        ("none", ""),
        ("ids", "Ġab Ã"),
        ("words", "ab Ġab Ã"),  # half a character reads like nothing
    ],
)
def test_barred_tokens(bpe, forbid, barred):
    vocabulary = Vocabulary(bpe, forbid_target_tokens=forbid)
    tokens = vocabulary.for_target(target_of("Ġab", "Ã", "Ã"), key=0)
    columns = tokens.barred_columns
    assert {PIECES[i] for i in vocabulary.ids(columns).tolist()} == set(barred.split())
    allowed = tokens.allowed_columns.tolist()
    assert sorted([*columns.tolist(), *allowed]) == list(range(len(PIECES)))
    for token_id in range(len(PIECES)):
        assert tokens.allows(token_id) == (token_id in vocabulary.ids(tokens.allowed_columns))
    assert not tokens.allows(99)
    assert tokens.bar_(torch.zeros(2, len(PIECES))).isneginf().sum() == 2 * len(columns)


def test_words_are_compared_without_case_and_space(bpe):
    vocabulary = Vocabulary(bpe, ["no_special"], "words")
    tokens = vocabulary.for_target(target_of("ĠA", "Ċ"), key=0)
    ids = tokens.ids(tokens.barred_columns).tolist()
    assert {PIECES[i] for i in ids} == {"a", "A", "Ġa", "ĠA", "Ġ", "Ċ"}


def test_a_target_that_bars_all_is_refused(bpe, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("a\nA\n")
    vocabulary = Vocabulary(bpe, [str(file)], "words")
    vocabulary.check_targets([target_of("bc")])
    with pytest.raises(InputError, match="target t .*bars all 2"):
        vocabulary.check_targets([target_of("bc"), target_of("Ġa")])


@pytest.mark.parametrize(
    ("allowed", "own", "sets"),
    [
        (None, (), []),
        (None, ("ascii", "printable"), ["ascii", "printable"]),
        ("round_trip", ("no_special",), ["round_trip", "no_special"]),
        ("ascii", ("ascii", "printable"), ["ascii", "printable"]),
        ("all", ("ascii", "printable"), ["all", "no_special"]),
        ("all", ("no_special",), ["all", "no_special"]),
        ("all", ("no_special", "round_trip"), ["all", "no_special"]),
        ("all", (), ["all"]),
    ],
)
def test_the_users_set_and_the_methods_own(allowed, own, sets):
    assert token_sets_of(allowed, own) == sets


# ---- what a method takes from them


def test_best_and_random_ids_are_allowed(bpe):
    vocabulary = Vocabulary(bpe, ["ascii"], "words")
    tokens = vocabulary.for_target(target_of("c", "ĠA"), key=0)
    allowed = set(tokens.ids(tokens.allowed_columns).tolist())
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, len(vocabulary), generator=rng)
    before = logits.clone()
    order = tokens.bar_(logits.clone()).argsort(-1, descending=True)
    assert torch.equal(tokens.argmax_ids(logits), tokens.ids(order[:, 0]))
    assert torch.equal(logits, before)
    drawn = tokens.random_ids(50, 4, rng)
    assert drawn.shape == (50, 4)
    assert set(drawn.flatten().tolist()) == allowed


@pytest.mark.parametrize("forbid", ["none", "ids"])
def test_echoes_hold_neighbours_of_the_target(bpe, forbid):
    target = target_of("ab", "c", "Ġa")
    tokens = Vocabulary(bpe, ["no_special"], forbid).for_target(target, key=0)
    prompts = echo_prompts(tokens, 7, 5, torch.Generator().manual_seed(0))
    assert prompts.shape == (5, 7)
    assert not set(prompts.flatten().tolist()) & set(target.ids)
    own, others = bpe.embed(torch.tensor(target.ids)), tokens.ids(tokens.allowed_columns)
    others = others[~torch.isin(others, torch.tensor(target.ids))]
    cosines = torch.cosine_similarity(own[:, None], bpe.embed(others)[None], dim=-1)
    nearest = others[cosines.argmax(-1)]
    assert prompts[0].tolist() == nearest.repeat(3)[-7:].tolist()


def test_echoes_of_all_there_is_hold_the_target(bpe, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("a\n")
    tokens = Vocabulary(bpe, [str(file)]).for_target(target_of("a", "a"), key=0)
    prompts = echo_prompts(tokens, 3, 1, torch.Generator().manual_seed(0))
    assert prompts.tolist() == [list(ids_of("a", "a", "a"))]


def test_echoes_round_trip_where_they_must(bpe):
    target = target_of("c", "A")
    free, bound = (
        Vocabulary(bpe, ["no_special", *sets]).for_target(target, key=0)
        for sets in ([], ["round_trip"])
    )
    drawn = echo_prompts(free, 8, 20, torch.Generator().manual_seed(0))
    assert len(bound.surviving(drawn)) < 20
    prompts = echo_prompts(bound, 8, 20, torch.Generator().manual_seed(0))
    assert torch.equal(bound.surviving(prompts), prompts)


# ---- prompts that round-trip


def test_repaired_prompts_round_trip_and_are_allowed(bpe):
    vocabulary = Vocabulary(bpe, ["round_trip"], "words")
    tokens = vocabulary.for_target(target_of("d", "ĠA"), key=3)
    allowed = set(tokens.ids(tokens.allowed_columns).tolist())
    rng = torch.Generator().manual_seed(1)
    prompts = tokens.random_ids(60, 8, rng)
    before = torch.tensor([bpe.encode(bpe.decode(row)) == row for row in prompts.tolist()])
    assert round_trips(bpe, prompts.tolist()) == before.tolist()
    assert 0 < before.sum() < 60
    assert torch.equal(tokens.surviving(prompts), prompts[before])
    assert tokens.surviving(prompts[:0]).shape == (0, 8)
    for preferences in (None, torch.randn(8, len(vocabulary), generator=rng)):
        repaired = tokens.repaired(prompts, preferences)
        assert all(tokens.round_trips(row) for row in repaired.tolist())
        assert set(repaired.flatten().tolist()) <= allowed
        assert torch.equal(repaired[before], prompts[before])
        assert torch.equal(repaired, tokens.repaired(prompts, preferences))
    logits = torch.randn(40, 8, len(vocabulary), generator=rng)
    assert all(tokens.round_trips(tokens.argmax_ids(z).tolist()) for z in logits)


def test_prompts_that_need_not_round_trip_stay_as_they_are(bpe):
    tokens = Vocabulary(bpe).for_target(target_of("d"), key=0)
    prompts = torch.tensor([ids_of("a", "b", "A")])
    assert not tokens.round_trips(prompts[0].tolist())
    assert tokens.repaired(prompts) is prompts


def test_the_same_text_is_preferred_and_then_the_likeliest_token(bpe):
    vocabulary = Vocabulary(bpe, ["round_trip"])
    tokens = vocabulary.for_target(target_of("d"), key=0)
    logits = torch.zeros(3, len(vocabulary))
    logits[0, vocabulary.columns(torch.tensor(PIECES.index("c")))] = 1.0

    def repaired(*pieces):
        [ids] = tokens.repaired(torch.tensor([ids_of(*pieces)]), logits).tolist()
        return [PIECES[i] for i in ids]

    assert repaired("a", "bc", "A") == ["ab", "c", "A"]  # "abcA" has other ids of the same number
    assert repaired("a", "b", "A") == ["c", "b", "A"]  # "abA" has only two


@pytest.mark.real
def test_which_prompts_survive_in_the_packaged_vocabulary():
    """All at once as one by one, in a chat as alone."""
    lm = load_lm()
    chat = Template("joke {slot}", chat=True).fill(lm, {}, "").context
    rng = torch.Generator().manual_seed(0)
    for context, length in itertools.product((NO_CONTEXT, chat), (5, 20, 80)):
        tokens = Vocabulary(lm, ["no_special", "round_trip"]).for_target(
            Target.single("t", (100,), "", context), key=0
        )
        [prompt] = tokens.repaired(tokens.random_ids(1, length, rng))
        swapped = prompt.repeat(64, 1)
        places = torch.randint(length, (64,), generator=rng)
        swapped[torch.arange(64), places] = tokens.random_ids(1, 64, rng)[0]
        whole = [list(context.text_ids(row)) for row in swapped.tolist()]
        keep = torch.tensor([lm.encode(lm.decode(ids)) == ids for ids in whole])
        assert 32 < keep.sum() < 64
        assert torch.equal(tokens.surviving(swapped), swapped[keep])
