"""Which tokens a prompt may hold: the sets, what a target bars, and prompts that survive."""

import dataclasses
import math

import pytest
import torch
from conftest import METHODS, SMALL, make_config
from test_contracts import StopAfter, comparable
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dlmi import DLMI, InputError, Target, Vocabulary, load_lm
from dlmi.callbacks import GradientStudy, ResultWriter, RunCheckpoint
from dlmi.estimators import PromptSampler
from dlmi.evaluation import Evaluation
from dlmi.gradients import read_gradient_rows
from dlmi.methods import GCG
from dlmi.relaxation import row_entropy
from dlmi.results import read_rows
from dlmi.round_trip import mend_prompts, round_trips
from dlmi.slots import Budget, Slot
from dlmi.token_sets import select_tokens

CPU = torch.device("cpu")
MERGES = ["a b", "c d", "Ġ a", "Ġ A", "Ã ©", "ab cd", "Ġ ab", "b c"]
PIECES = ["<eos>", "<bos>", *"abcdAĠĊÃ©", *(merge.replace(" ", "") for merge in MERGES)]
TEXTS = ["ab c", "d\nA"]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A tiny Llama whose tokens merge with their neighbours; two of them are halves of an é."""
    folder = tmp_path_factory.mktemp("bpe")
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make_config("llama")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bpe(bpe_folder):
    return load_lm(bpe_folder, dtype="float64")


def ids_of(*pieces):
    return tuple(PIECES.index(piece) for piece in pieces)


def target_of(*pieces):
    return Target("t", ids_of(*pieces), "")


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
        DLMI(allowed_tokens="asci")
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
    target = target_of("Ġab", "Ã", "Ã")
    columns = vocabulary.barred_columns(target)
    assert {PIECES[i] for i in vocabulary.ids(columns).tolist()} == set(barred.split())
    allowed = vocabulary.allowed_columns(target).tolist()
    assert sorted([*columns.tolist(), *allowed]) == list(range(len(PIECES)))
    assert vocabulary.allows(PIECES.index("Ġab"), target) == (forbid == "none")


def test_words_are_compared_without_case_and_space(bpe):
    vocabulary = Vocabulary(bpe, ["no_special"], "words")
    ids = vocabulary.ids(vocabulary.barred_columns(target_of("ĠA", "Ċ"))).tolist()
    assert {PIECES[i] for i in ids} == {"a", "A", "Ġa", "ĠA", "Ġ", "Ċ"}


def test_a_target_that_bars_all_is_refused(bpe_folder, data, fit, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("a\nA\n")
    options = {"allowed_tokens": str(file), "forbid_target_tokens": "words"}
    with pytest.raises(InputError, match="target text_1 .*bars all 2"):
        fit(DLMI(**SMALL, **options), data(lm=bpe_folder, texts=["bc", " a"]))


def test_topk_counts_what_the_targets_leave(bpe_folder, data, fit):
    model = GCG(**SMALL, topk=13, search_width=8, forbid_target_tokens="ids")
    with pytest.raises(InputError, match="at most 12"):
        fit(model, data(lm=bpe_folder, texts=["bc"]))


# ---- barred logits


@pytest.mark.parametrize(
    "estimator", ["gumbel_softmax", "straight_through", "gumbel_rao", "reinmax"]
)
@pytest.mark.parametrize("smallest_tau", [1e-10, 1.0, 200.0])
def test_a_barred_token_is_as_good_as_absent(estimator, smallest_tau):
    """Same rows and gradients as without its column, also for tau, and never a nan."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 40, generator=generator)
    matrix = torch.randn(40, 3, generator=generator)
    tau = torch.tensor([[smallest_tau, 1.0, 2.0, 100.0]])
    results = []
    for count in (40, 30):
        z = logits[:, :count].clone()
        z[:, 30:] = -torch.inf
        z.requires_grad_()
        taus = tau.clone().requires_grad_(estimator != "reinmax")
        embeds = PromptSampler(estimator, 3, rao_draws=2)([z], taus, matrix[:count], [7])
        wanted = [z, taus] if taus.requires_grad else [z]
        gradients = torch.autograd.grad(embeds.sin().sum(), wanted)
        assert (gradients[0][:, 30:] == 0).all()
        results.append([embeds, gradients[0][:, :30], *gradients[1:]])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth)


def test_entropy_of_a_row_with_barred_tokens():
    logits = torch.tensor([[1.0, -torch.inf, 1.0, -torch.inf]])
    torch.testing.assert_close(row_entropy(logits, torch.ones(1)), torch.tensor([2.0]).log())


# ---- prompts that survive


def test_mended_prompts_survive_and_are_allowed(bpe):
    vocabulary = Vocabulary(bpe, ["round_trip"], "words")
    slot = Slot.open(0, target_of("d", "ĠA"), 0, CPU)
    allowed = vocabulary.ids(vocabulary.allowed_columns(slot.target))
    generator = torch.Generator().manual_seed(1)
    prompts = allowed[torch.randint(len(allowed), (60, 8), generator=generator)]
    before = [round_trips(bpe, row) for row in prompts.tolist()]
    assert 0 < sum(before) < 60
    for preferences in (None, torch.randn(8, len(vocabulary), generator=generator)):
        if preferences is not None:
            vocabulary.bar_(preferences, slot.target)
        mended = mend_prompts(vocabulary, slot, prompts, lambda p=preferences: p)
        assert all(round_trips(bpe, row) for row in mended.tolist())
        assert set(mended.flatten().tolist()) <= set(allowed.tolist())
        assert torch.equal(mended[torch.tensor(before)], prompts[torch.tensor(before)])
        again = mend_prompts(vocabulary, slot, prompts, lambda p=preferences: p)
        assert torch.equal(mended, again)


def test_the_same_text_is_preferred_and_then_what_the_method_likes(bpe):
    vocabulary = Vocabulary(bpe, ["round_trip"])
    slot = Slot.open(0, target_of("d"), 0, CPU)
    liked = torch.zeros(3, len(vocabulary))
    liked[0, vocabulary.columns(torch.tensor(PIECES.index("c")))] = 1.0

    def mended(*pieces):
        ids = torch.tensor([ids_of(*pieces)])
        return [PIECES[i] for i in mend_prompts(vocabulary, slot, ids, lambda: liked)[0].tolist()]

    assert mended("a", "bc", "A") == ["ab", "c", "A"]  # "abcA" has other ids of the same number
    assert mended("a", "b", "A") == ["c", "b", "A"]  # "abA" has only two


def test_what_does_not_survive_is_best_only_where_nothing_does():
    slot = Slot.open(0, Target("t", (5,), "t"), 0, CPU)
    broken = Evaluation(0, (2, 3), (5,), lcs=1.0, discrete_loss=0.1, is_eligible=False)
    slot.record(broken)
    assert slot.best is broken
    assert slot.stop_reason(Budget(10)) is None
    slot.record(dataclasses.replace(broken, lcs=0.0, output_ids=(6,), is_eligible=True))
    slot.record(broken)
    assert slot.best.is_eligible
    assert Slot.from_state(slot.state(), {"t": slot.target}, CPU).best == slot.best


# ---- every method


@pytest.fixture(params=list(METHODS))
def restricted(request, data, fit, bpe_folder):
    """Rows of each method on the LM whose tokens merge, under given options."""
    method, settings = METHODS[request.param]
    own = {"topk": 3} if method is GCG else {}

    def run(**options):
        model = method(**{**SMALL, **settings, **own, **options})
        rows = fit(model, data(lm=bpe_folder, texts=TEXTS, batch_size=2))
        assert len(rows) == len(TEXTS)
        assert not any(z.isnan().any() for z in model.Z)
        return list(rows.values())

    return run


def test_no_method_holds_tokens_of_the_target_or_special_ones(restricted):
    for row in restricted(allowed_tokens="no_special", forbid_target_tokens="ids"):
        assert row.overlap_ratio == row.target_hit_ratio == 0
        assert not set(row.prompt_ids) & set(ids_of("<eos>", "<bos>"))


def test_prompts_of_every_method_survive_and_hold_no_word_of_the_target(restricted, bpe):
    for row in restricted(allowed_tokens="round_trip", forbid_target_tokens="words"):
        assert row.round_trips
        assert row.round_trip_lcs == row.lcs
        words = {text.strip().casefold() for text in row.target_tokens}
        assert not words & {text.strip().casefold() for text in row.prompt_tokens}
        assert row.lcs == max(point.lcs for point in row.trace)


def test_without_the_options_prompts_do_what_they_forbid(data, fit, bpe_folder):
    model = DLMI(**{**SMALL, "prompt_length": 12}, tau0=1.0, num_samples=2)
    rows = fit(model, data(lm=bpe_folder, texts=TEXTS)).values()
    assert any(row.overlap_ratio > 0 for row in rows)
    assert not all(row.round_trips for row in rows)


def test_hard_samples_and_the_random_floor_hold_what_is_allowed(bpe, monkeypatch):
    from dlmi.prompt_forms import Relaxation, measure_forms

    vocabulary = Vocabulary(bpe, ["ascii"], "words")
    slot = Slot.open(0, target_of("c", "ĠA"), 0, CPU)
    ids = torch.tensor(ids_of("b", "b", "d"))
    logits = vocabulary.bar_(torch.randn(3, len(vocabulary), dtype=torch.float64), slot.target)
    seen = []
    embed = bpe.embed
    monkeypatch.setattr(bpe, "embed", lambda ids: (seen.append(ids), embed(ids))[1])
    relaxation = Relaxation(logits, torch.ones(3, dtype=torch.float64), "gumbel_softmax")
    matrix, _ = measure_forms(vocabulary, slot, ids, ids, relaxation, False)
    assert all(value == value for row in matrix.values() for value in row.values())
    drawn = [s for s in seen if s.shape == (8, 3)] + seen[2:3]
    allowed = set(vocabulary.ids(vocabulary.allowed_columns(slot.target)).tolist())
    assert len(drawn) == 2
    assert {int(i) for s in drawn for i in s.flatten()} <= allowed


def test_a_resumed_run_keeps_its_bars(data, fit, bpe_folder, tmp_path):
    options = {"allowed_tokens": "round_trip", "forbid_target_tokens": "words"}

    def run(steps=None, **kwargs):
        model = DLMI(**{**SMALL, "steps": 8}, tau0=1.0, num_samples=2, **options)
        callbacks = [ResultWriter(), RunCheckpoint(), *([StopAfter(steps)] if steps else [])]
        folder = {"default_root_dir": tmp_path / ("cut" if steps or kwargs else "whole")}
        targets = data(lm=bpe_folder, texts=TEXTS)
        fit(model, targets, callbacks=callbacks, enable_checkpointing=True, **folder, **kwargs)
        return comparable({row.target_id: row for row in read_rows(folder["default_root_dir"])})

    expected = run()
    run(steps=3)
    assert run(ckpt_path=tmp_path / "cut" / "checkpoints" / "last.ckpt") == expected


def test_a_changed_file_of_tokens_is_another_run(data, fit, bpe_folder, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("a\nb\nc\n")
    options = {**SMALL, "tau0": 1.0, "num_samples": 1, "allowed_tokens": str(file)}
    targets = {"lm": bpe_folder, "texts": TEXTS}
    callbacks = [RunCheckpoint(), StopAfter(2)]
    fit(DLMI(**options), data(**targets), callbacks=callbacks, enable_checkpointing=True)
    file.write_text("a\nb\nd\n")
    with pytest.raises(InputError, match="allowed_tokens as ids"):
        fit(DLMI(**options), data(**targets), tmp_path / "checkpoints" / "last.ckpt")


def test_gradients_are_measured_under_the_bars(data, fit, bpe_folder, tmp_path):
    names = ["gs_decoupled_tau1", "rloo", "gumbel_rao"]
    study = GradientStudy(names, 4, 4, draws=3, truth="exact")
    model = DLMI(prompt_length=2, steps=2, tau0=1.0, num_samples=2, forbid_target_tokens="words")
    fit(model, data(lm=bpe_folder, texts=TEXTS[:1]), callbacks=[study])
    rows, _ = read_gradient_rows(tmp_path / "gradients.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert math.isfinite(row.bias_max.value)
        assert math.isfinite(row.variance_max.value)
