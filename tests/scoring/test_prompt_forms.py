"""The LCS matrix against decodes made apart, and its floors."""

import dataclasses

import pytest
import torch
from helpers.methods import SMALL
from helpers.runs import StopAfter

from dlmi import Inverter, load_lm
from dlmi.estimators.soft_embedding import soft_embedding
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.methods import DLMI, GBDA, GCG, SODA
from dlmi.metrics import lcs_ratio
from dlmi.scoring.evaluation import evaluate_alone, pasted_lcs
from dlmi.scoring.prompt_forms import BEST_OF_SAMPLES, DECODES, FLOORS, FORMS, measure_forms
from dlmi.targets.context import NO_CONTEXT, Context
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

N = 5
IDS = torch.arange(4, 4 + N)
TARGET = (3, 9, 4, 20)
SEED = 11


@pytest.fixture
def logits():
    return torch.randn(N, 31, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def decoded(lm, embeds, target=TARGET):
    """Both decodes of one prompt, (N, d), each run on its own."""
    target_ids = torch.tensor([target])
    free_ids = lm.free_run(embeds[None], len(target)).argmax(-1)
    forced_ids = lm.target_logits(embeds[None], target_ids).argmax(-1)
    return {
        "free_greedy": lcs_ratio(target, free_ids[0].tolist()),
        "teacher_forced": lcs_ratio(target, forced_ids[0].tolist()),
    }


def measure(
    lm, target_ids=TARGET, context=NO_CONTEXT, best_ids=IDS, last_ids=None, soft_prompt=None, key=0
):
    """The matrix of a target and its rank-1 rate; the last prompt is the best one backwards."""
    target = Target.single("t", target_ids, "text", context)
    last_ids = best_ids.flip(0) if last_ids is None else last_ids
    tokens = Vocabulary(lm).for_target(target, key)
    known = [evaluate_alone(lm, best_ids.tolist(), target, 0)]
    return measure_forms(tokens, known, last_ids, soft_prompt, SEED, key)


def test_discrete_forms_are_decodes_of_their_ids(tiny):
    matrix, _ = measure(tiny)
    assert matrix["best_so_far"] == decoded(tiny, tiny.embed(IDS))
    assert matrix["argmax"] == decoded(tiny, tiny.embed(IDS.flip(0)))
    copy = torch.tensor([20, *TARGET])  # five tokens of 3 9 4 20 3 9 4 20 ..., the end last
    assert matrix["copy_prompt"] == decoded(tiny, tiny.embed(copy))
    bos = torch.tensor([tiny.bos_id])
    assert matrix["no_prompt"] == decoded(tiny, tiny.embed(bos))
    assert set(matrix) == {"best_so_far", "argmax", *FLOORS}


def test_relaxed_forms_are_decodes_of_their_embeddings(tiny, logits):
    tau = torch.full((N,), 0.7, dtype=torch.float64)
    soft_prompt = SoftPrompt(logits, tau, "gumbel_softmax", samples=3, seed=SEED + 1)
    matrix, _ = measure(tiny, soft_prompt=soft_prompt)
    assert list(matrix) == list(FORMS)
    embeddings = tiny.embedding_matrix[tiny.prompt_token_ids]
    soft = torch.softmax(logits / 0.7, -1) @ embeddings
    assert matrix["softmax"] == decoded(tiny, soft)
    noisy = soft_embedding([logits], tau[None], embeddings, [SEED])[0, 0]
    assert matrix["gumbel_sample"] == decoded(tiny, noisy)
    columns = soft_prompt.hard_columns(8, SEED)
    apart = [decoded(tiny, tiny.embed(tiny.prompt_token_ids[row])) for row in columns]
    assert matrix[BEST_OF_SAMPLES] == {d: max(a[d] for a in apart) for d in DECODES}


def test_forms_meet_where_the_distribution_is_sharp(tiny, logits):
    """At a vanishing temperature every noise-free form is the argmax prompt."""
    tau = torch.full((N,), 1e-4, dtype=torch.float64)
    last_ids = tiny.prompt_token_ids[logits.argmax(-1)]
    matrix, _ = measure(tiny, last_ids=last_ids, soft_prompt=SoftPrompt(logits, tau))
    assert "gumbel_sample" not in matrix
    assert matrix["softmax"] == matrix["argmax"] == matrix[BEST_OF_SAMPLES]


def test_bos_stands_before_prompts_but_not_twice_before_none(tiny):
    matrix, _ = measure(tiny, context=Context(start_ids=(tiny.bos_id,)))
    bos = torch.tensor([tiny.bos_id])
    assert matrix["best_so_far"] == decoded(tiny, tiny.embed(torch.cat([bos, IDS])))
    assert matrix["no_prompt"] == decoded(tiny, tiny.embed(bos))


def test_fixed_tokens_stand_around_prompts_and_alone_where_there_is_none(tiny):
    matrix, _ = measure(tiny, context=Context(((7, 8), (9,))))
    around = torch.tensor([7, 8, *IDS.tolist(), 9])
    assert matrix["best_so_far"] == decoded(tiny, tiny.embed(around))
    assert matrix["no_prompt"] == decoded(tiny, tiny.embed(torch.tensor([7, 8, 9])))


def test_hard_samples_follow_the_methods_own_distribution():
    """A Gumbel sample's argmax does not feel tau; a noise-free row's draw does."""
    logits = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    tau = torch.tensor([0.1], dtype=torch.float64)
    noisy = SoftPrompt(logits, tau, "gumbel_softmax").hard_columns(4000, 1).double().mean()
    plain = SoftPrompt(logits, tau).hard_columns(4000, 1).double().mean()
    assert float(noisy) == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.03)
    assert float(plain) == pytest.approx(torch.sigmoid(torch.tensor(10.0)).item(), abs=0.01)


def test_rank_one_rate_counts_tokens_that_the_lm_would_say_anyway(tiny):
    said = tiny.greedy(torch.tensor([[tiny.bos_id]]), 4)[0].tolist()
    assert measure(tiny, said)[1] == 1.0
    assert measure(tiny, [*said[:3], (said[3] + 1) % 30])[1] == 0.75


def test_random_prompts_differ_by_key_only(tiny):
    def random_lcs(key, best_ids=IDS):
        return tuple(measure(tiny, best_ids=best_ids, key=key)[0]["random_prompt"].values())

    by_key = [random_lcs(key) for key in range(12)]
    assert len(set(by_key)) > 1
    assert [random_lcs(key, IDS + 9) for key in range(12)] == by_key


def test_what_was_evaluated_is_not_decoded_again(tiny, monkeypatch):
    target = Target.single("t", TARGET, "text")
    known = [evaluate_alone(tiny, ids.tolist(), target, 0) for ids in (IDS, IDS.flip(0))]
    seen, embed = [], tiny.embed
    monkeypatch.setattr(tiny, "embed", lambda ids: (seen.append(ids.tolist()), embed(ids))[1])
    tokens = Vocabulary(tiny).for_target(target, 0)
    matrix, _ = measure_forms(tokens, known, IDS.flip(0), None, SEED, 0)
    assert not any(row in (IDS.tolist(), IDS.flip(0).tolist()) for ids in seen for row in ids)
    assert matrix == measure(tiny)[0]
    said = dataclasses.replace(known[0], output_ids=TARGET)  # whose text is read as the same ids
    assert pasted_lcs(tiny, said, target) == 1


@pytest.mark.parametrize(
    ("method", "absent"),
    [
        (DLMI(tau0=1.0, num_samples=2), set()),
        (GBDA(num_samples=2), set()),
        (SODA(), {"gumbel_sample"}),
        (GCG(search_width=8, topk=4), {"gumbel_sample", "softmax", BEST_OF_SAMPLES}),
    ],
)
def test_rows_carry_the_forms_that_the_method_has(method, absent, data, fit):
    for row in fit(Inverter(method, **SMALL), data()).values():
        assert set(row.lcs_matrix) == set(FORMS) - absent
        assert row.lcs_matrix["best_so_far"]["free_greedy"] == row.lcs
        last = row.trace[-1]
        assert row.lcs_matrix["argmax"]["free_greedy"] == last.lcs
        for form in ("best_so_far", "argmax", "random_prompt", "copy_prompt"):
            cells = row.lcs_matrix[form]
            # For a discrete prompt the two decodes agree on what is exact.
            assert (cells["free_greedy"] == 1) == (cells["teacher_forced"] == 1)
        if "tau" in row.diagnostics:
            assert len(row.diagnostics["tau"]) == 5
            assert last.means["tau"] == pytest.approx(sum(row.diagnostics["tau"]) / 5)


def test_an_interrupted_target_does_not_keep_anyone_waiting(data, fit):
    inverter = Inverter(DLMI(tau0=1.0, num_samples=2), **SMALL)
    rows = fit(inverter, data(), callbacks=[StopAfter(2)])
    assert {row.stop_reason for row in rows.values()} == {"interrupted"}
    assert all(row.lcs_matrix == {} and row.rank_one_rate is None for row in rows.values())


def test_an_lm_without_bos_has_no_floor_of_no_prompt(model_folder):
    lm = load_lm(str(model_folder()), dtype="float64")
    lm.tokenizer.bos_token = lm.tokenizer.eos_token = None
    matrix, rank_one_rate = measure(lm)
    assert "no_prompt" not in matrix
    assert rank_one_rate is None
