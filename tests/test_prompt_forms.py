"""The LCS matrix against decodes made apart, and its floors."""

import pytest
import torch
from conftest import SMALL
from test_contracts import StopAfter

from dlmi import load_lm
from dlmi.methods import DLMI, GBDA, GCG, SODA
from dlmi.metrics import lcs_ratio
from dlmi.prompt_forms import (
    BEST_OF_SAMPLES,
    DECODES,
    FLOORS,
    FORMS,
    Relaxation,
    measure_forms,
)
from dlmi.slots import Slot
from dlmi.soft_embedding import soft_embedding
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

N = 5
TARGET = (3, 9, 4, 20)


@pytest.fixture
def slot():
    return Slot.open(0, Target("t", TARGET, "text"), 0, torch.device("cpu"))


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


def matrix_of(lm, slot, relaxation, prompt_bos=False):
    ids = torch.arange(4, 4 + N)
    return measure_forms(Vocabulary(lm), slot, ids, ids.flip(0), relaxation, prompt_bos)[0], ids


def test_discrete_forms_are_decodes_of_their_ids(tiny, slot):
    matrix, ids = matrix_of(tiny, slot, None)
    assert matrix["best_so_far"] == decoded(tiny, tiny.embed(ids))
    assert matrix["argmax"] == decoded(tiny, tiny.embed(ids.flip(0)))
    copy = torch.tensor([20, *TARGET])  # five tokens of 3 9 4 20 3 9 4 20 ..., the end last
    assert matrix["copy_prompt"] == decoded(tiny, tiny.embed(copy))
    bos = torch.tensor([tiny.bos_id])
    assert matrix["no_prompt"] == decoded(tiny, tiny.embed(bos))
    assert set(matrix) == {"best_so_far", "argmax", *FLOORS}


def test_relaxed_forms_are_decodes_of_their_embeddings(tiny, slot, logits):
    tau = torch.full((N,), 0.7, dtype=torch.float64)
    matrix, _ = matrix_of(tiny, slot, Relaxation(logits, tau, "gumbel_softmax"))
    assert list(matrix) == list(FORMS)
    embeddings = tiny.embedding_matrix[tiny.prompt_token_ids]
    soft = torch.softmax(logits / 0.7, -1) @ embeddings
    assert matrix["softmax"] == decoded(tiny, soft)
    seed = slot.noise_seed("forms of the prompt")
    noisy = soft_embedding([logits], tau[None], embeddings, [seed])[0, 0]
    assert matrix["gumbel_sample"] == decoded(tiny, noisy)
    columns = Relaxation(logits, tau, "gumbel_softmax").hard_columns(8, seed)
    apart = [decoded(tiny, tiny.embed(tiny.prompt_token_ids[row])) for row in columns]
    assert matrix[BEST_OF_SAMPLES] == {d: max(a[d] for a in apart) for d in DECODES}


def test_forms_meet_where_the_distribution_is_sharp(tiny, slot, logits):
    """At a vanishing temperature every noise-free form is the argmax prompt."""
    tau = torch.full((N,), 1e-4, dtype=torch.float64)
    last_ids = tiny.prompt_token_ids[logits.argmax(-1)]
    matrix, _ = measure_forms(
        Vocabulary(tiny), slot, last_ids, last_ids, Relaxation(logits, tau), False
    )
    assert "gumbel_sample" not in matrix
    assert matrix["softmax"] == matrix["argmax"] == matrix[BEST_OF_SAMPLES]


def test_bos_stands_before_prompts_but_not_before_none(tiny, slot):
    matrix, ids = matrix_of(tiny, slot, None, prompt_bos=True)
    bos = torch.tensor([tiny.bos_id])
    assert matrix["best_so_far"] == decoded(tiny, tiny.embed(torch.cat([bos, ids])))
    assert matrix["no_prompt"] == decoded(tiny, tiny.embed(bos))


def test_hard_samples_follow_the_methods_own_distribution():
    """A Gumbel sample's argmax does not feel tau; a noise-free row's draw does."""
    logits = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    tau = torch.tensor([0.1], dtype=torch.float64)
    noisy = Relaxation(logits, tau, "gumbel_softmax").hard_columns(4000, 1).double().mean()
    plain = Relaxation(logits, tau).hard_columns(4000, 1).double().mean()
    assert float(noisy) == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.03)
    assert float(plain) == pytest.approx(torch.sigmoid(torch.tensor(10.0)).item(), abs=0.01)


def test_rank_one_rate_counts_tokens_that_the_lm_would_say_anyway(tiny):
    def rate(target_ids):
        slot = Slot.open(0, Target("t", tuple(target_ids), "text"), 0, torch.device("cpu"))
        ids = torch.arange(4, 4 + N)
        return measure_forms(Vocabulary(tiny), slot, ids, ids, None, False)[1]

    said = tiny.greedy(torch.tensor([[tiny.bos_id]]), 4)[0].tolist()
    assert rate(said) == 1.0
    assert rate([*said[:3], (said[3] + 1) % 30]) == 0.75


def test_random_prompts_differ_by_seed_and_target_only(tiny):
    def random_lcs(seed, name):
        slot = Slot.open(0, Target(name, TARGET, "text"), seed, torch.device("cpu"))
        return matrix_of(tiny, slot, None)[0]["random_prompt"]

    assert random_lcs(0, "a") == random_lcs(0, "a")
    seen = {tuple(random_lcs(seed, "a").values()) for seed in range(12)}
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("method", "absent"),
    [
        (DLMI(**SMALL, tau0=1.0, num_samples=2), set()),
        (GBDA(**SMALL, num_samples=2), set()),
        (SODA(**SMALL), {"gumbel_sample"}),
        (GCG(**SMALL, search_width=8, topk=4), {"gumbel_sample", "softmax", BEST_OF_SAMPLES}),
    ],
)
def test_rows_carry_the_forms_that_the_method_has(method, absent, data, fit):
    for row in fit(method, data()).values():
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
    rows = fit(DLMI(**SMALL, tau0=1.0, num_samples=2), data(), callbacks=[StopAfter(2)])
    assert {row.stop_reason for row in rows.values()} == {"interrupted"}
    assert all(row.lcs_matrix == {} and row.rank_one_rate is None for row in rows.values())


def test_an_lm_without_bos_has_no_floor_of_no_prompt(model_folder, slot):
    lm = load_lm(str(model_folder()), dtype="float64")
    lm.tokenizer.bos_token = lm.tokenizer.eos_token = None
    ids = torch.arange(4, 4 + N)
    matrix, rank_one_rate = measure_forms(Vocabulary(lm), slot, ids, ids, None, False)
    assert "no_prompt" not in matrix
    assert rank_one_rate is None
