"""Runs under restrictions of what a prompt may hold."""

import dataclasses
import math

import pytest
import torch
from helpers.bpe_model import ids_of, save_bpe_model
from helpers.methods import METHODS, SMALL, make_inverter
from helpers.resuming import assert_resumes
from helpers.runs import StopAfter
from helpers.slots import open_slot

from dlmi import InputError, Inverter, Target, Vocabulary, load_lm
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.estimators.temperature import row_entropy
from dlmi.gradient_rows import read_gradient_rows
from dlmi.gradients.callback import GradientStudy
from dlmi.methods import DLMI, GCG
from dlmi.run.budget import Budget
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.scoring.evaluation import Evaluation, evaluate_alone
from dlmi.scoring.prompt_forms import HARD_SAMPLES, measure_forms

TEXTS = ["ab c", "d\nA"]
RELAXED = DLMI(tau0=1.0, num_samples=2)


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    save_bpe_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bpe(bpe_folder):
    return load_lm(bpe_folder, dtype="float64")


def test_a_target_that_bars_all_is_refused(bpe_folder, data, fit, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("a\nA\n")
    options = {"allowed_tokens": str(file), "forbid_target_tokens": "words"}
    with pytest.raises(InputError, match="target text_1 .*bars all 2"):
        fit(Inverter(DLMI(), **SMALL, **options), data(lm=bpe_folder, texts=["bc", " a"]))


def test_topk_counts_what_the_targets_leave(bpe_folder, data, fit):
    inverter = Inverter(GCG(topk=13, search_width=8), **SMALL, forbid_target_tokens="ids")
    with pytest.raises(InputError, match="at most 12"):
        fit(inverter, data(lm=bpe_folder, texts=["bc"]))


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
        prompt = SoftPrompt(z, taus[0], estimator, samples=3, seed=7, rao_draws=2)
        [embeds] = soft_embeds([prompt], matrix[:count])
        wanted = [z, taus] if taus.requires_grad else [z]
        gradients = torch.autograd.grad(embeds.sin().sum(), wanted)
        assert (gradients[0][:, 30:] == 0).all()
        results.append([embeds, gradients[0][:, :30], *gradients[1:]])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth)


def test_entropy_of_a_row_with_barred_tokens():
    logits = torch.tensor([[1.0, -torch.inf, 1.0, -torch.inf]])
    torch.testing.assert_close(row_entropy(logits, torch.ones(1)), torch.tensor([2.0]).log())


def test_what_does_not_survive_is_best_only_where_nothing_does(tiny):
    slot = open_slot(Vocabulary(tiny), Target.single("t", (5,), "t"))
    broken = Evaluation(0, (2, 3), (5,), 1.0, 0.1, 0.0, (5,), is_alone=True, is_eligible=False)
    budget = Budget(10)
    slot.record(broken)
    assert slot.best is broken
    assert budget.stop_reason(slot) is None
    slot.record(dataclasses.replace(broken, lcs=0.0, output_ids=(6,), is_eligible=True))
    slot.record(broken)
    assert slot.best.is_eligible
    slot.record(dataclasses.replace(broken, is_eligible=True))
    assert budget.stop_reason(slot) == "solved"


# ---- every method


@pytest.fixture(params=list(METHODS))
def restricted(request, data, fit, bpe_folder):
    """Rows of each method on the LM whose tokens merge, under given options."""

    def run(**options):
        inverter = make_inverter(request.param, **options)
        if isinstance(inverter.method, GCG):
            inverter.method = dataclasses.replace(inverter.method, topk=3)
        rows = fit(inverter, data(lm=bpe_folder, texts=TEXTS, batch_size=2))
        assert len(rows) == len(TEXTS)
        assert not any(z.isnan().any() for z in inverter.parameters())
        return list(rows.values())

    return run


def test_prompts_of_every_method_survive_and_hold_no_word_of_the_target(restricted):
    for row in restricted(allowed_tokens="round_trip", forbid_target_tokens="words"):
        assert row.round_trips
        assert row.round_trip_lcs == row.lcs
        words = {text.strip().casefold() for text in row.target_tokens}
        assert not words & {text.strip().casefold() for text in row.prompt_tokens}
        assert row.overlap_ratio == row.target_hit_ratio == 0
        assert row.lcs == max(point.lcs for point in row.trace)


@pytest.mark.parametrize("name", ["dlmi", "pez", "swap_search_random"])
def test_no_prompt_holds_tokens_of_the_target_or_special_ones(name, data, fit, bpe_folder):
    inverter = make_inverter(name, allowed_tokens="no_special", forbid_target_tokens="ids")
    for row in fit(inverter, data(lm=bpe_folder, texts=TEXTS)).values():
        assert row.overlap_ratio == row.target_hit_ratio == 0
        assert not set(row.prompt_ids) & set(ids_of("<eos>", "<bos>"))


def test_without_the_options_prompts_do_what_they_forbid(data, fit, bpe_folder):
    inverter = Inverter(RELAXED, **{**SMALL, "prompt_length": 12})
    rows = fit(inverter, data(lm=bpe_folder, texts=TEXTS)).values()
    assert any(row.overlap_ratio > 0 for row in rows)
    assert not all(row.round_trips for row in rows)


def test_hard_samples_and_the_random_floor_hold_what_is_allowed(bpe, monkeypatch):
    vocabulary = Vocabulary(bpe, ["ascii"], "words")
    tokens = vocabulary.for_target(Target.single("t", ids_of("c", "ĠA"), ""), 0)
    ids = torch.tensor(ids_of("b", "b", "d"))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, len(vocabulary), dtype=torch.float64, generator=generator)
    tau = torch.ones(3, dtype=torch.float64)
    soft_prompt = SoftPrompt(tokens.bar_(logits), tau, "gumbel_softmax")
    known = [evaluate_alone(bpe, ids.tolist(), tokens.target, 0)]
    seen = []
    embed = bpe.embed
    monkeypatch.setattr(bpe, "embed", lambda ids: (seen.append(ids), embed(ids))[1])
    matrix, _ = measure_forms(tokens, known, ids, soft_prompt, seed=1, key=2)
    assert all(value == value for row in matrix.values() for value in row.values())
    # The first that are embedded: random, copied, samples.
    random_ids, samples = seen[0], seen[2]
    assert (random_ids.shape, samples.shape) == ((1, 3), (HARD_SAMPLES, 3))
    allowed = set(tokens.ids(tokens.allowed_columns).tolist())
    assert {*random_ids.flatten().tolist(), *samples.flatten().tolist()} <= allowed


# ---- runs


def test_a_resumed_run_keeps_its_bars(data, fit, bpe_folder, tmp_path):
    options = {"allowed_tokens": "round_trip", "forbid_target_tokens": "words"}
    assert_resumes(
        lambda: Inverter(RELAXED, **SMALL, **options),
        lambda: data(lm=bpe_folder, texts=TEXTS),
        fit,
        tmp_path / "run",
    )


def test_a_changed_file_of_tokens_is_another_run(data, fit, bpe_folder, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("a\nb\nc\n")
    options = {**SMALL, "allowed_tokens": str(file)}
    targets = {"lm": bpe_folder, "texts": TEXTS}
    callbacks = [RunCheckpoint(), StopAfter(2)]
    inverter = Inverter(RELAXED, **options)
    fit(inverter, data(**targets), callbacks=callbacks, enable_checkpointing=True)
    file.write_text("a\nb\nd\n")
    with pytest.raises(InputError, match="allowed_tokens as ids"):
        fit(Inverter(RELAXED, **options), data(**targets), tmp_path / "checkpoints" / "last.ckpt")


def test_gradients_are_measured_under_the_bars(data, fit, bpe_folder, tmp_path):
    names = ["gs_decoupled_tau1", "rloo", "gumbel_rao"]
    study = GradientStudy(names, 4, 4, draws=3, truth="exact")
    inverter = Inverter(RELAXED, prompt_length=2, steps=2, forbid_target_tokens="words")
    fit(inverter, data(lm=bpe_folder, texts=TEXTS[:1]), callbacks=[study])
    rows, _ = read_gradient_rows(tmp_path / "gradients.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert math.isfinite(row.bias_max.value)
        assert math.isfinite(row.variance_max.value)
