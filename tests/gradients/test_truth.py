"""The true gradient of the expected loss of hard prompts, against enumeration."""

import itertools

import pytest
import torch
from helpers.toy_slot import ToyReader, normal, quadratic, toy_slot

from dlmi.estimators.score_function import moving_average, score_function_gradient
from dlmi.estimators.soft_embedding import sample_columns
from dlmi.gradients.callback import GradientStudy
from dlmi.gradients.estimators import ESTIMATORS, hard_loss, label
from dlmi.gradients.truth import (
    as_in_code_reference,
    choose_coordinates,
    conditional_truth,
    exact_truth,
    rloo_truth,
    sample_prompts,
)
from dlmi.methods import DLMI
from dlmi.methods.slot import Slot
from dlmi.scoring.engine import Engine
from dlmi.targets.files import texts_to_targets
from dlmi.targets.seeds import hash_seed
from dlmi.tokens.vocabulary import Vocabulary

N, V = 2, 4
LOGITS, READER = normal(N, V), quadratic(N, V)
LOSS = hard_loss(DLMI(), toy_slot(LOGITS), READER)
EXACT = exact_truth(LOSS, LOGITS).blocks[0]


def assert_compatible(draws, expected, errors=4.0):
    standard_error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() < errors * standard_error + 1e-12).all()


def test_enumeration_is_the_gradient_of_the_enumerated_expectation():
    logits = LOGITS.clone().requires_grad_()
    expectation = 0.0
    for prompt in itertools.product(range(V), repeat=N):
        columns = torch.tensor(prompt)
        probability = torch.log_softmax(logits, -1)[torch.arange(N), columns].sum().exp()
        expectation = expectation + probability * LOSS(columns[None])[0]
    (gradient,) = torch.autograd.grad(expectation, logits)
    torch.testing.assert_close(EXACT, gradient.flatten())
    torch.testing.assert_close(EXACT.view(N, V).sum(-1), torch.zeros(N, dtype=torch.float64))


def test_enumeration_on_the_tiny_lm_is_what_its_definition_says(tiny):
    """pi (E[L | x_j = v] - J), with the expectations written out."""
    [target] = texts_to_targets(tiny, ["w1 w2"])
    vocabulary = Vocabulary(tiny)
    tokens = len(vocabulary)
    logits = normal(2, tokens, seed=2)
    slot = toy_slot(logits)
    slot = Slot(target, target.examples, vocabulary.for_target(target, 0), slot.params, 2, slot.rng)
    loss = hard_loss(DLMI(teacher_forcing=False), slot, Engine(vocabulary))
    found = exact_truth(loss, logits).blocks[0].view(2, tokens)
    p = torch.softmax(logits, -1)
    columns = torch.cartesian_prod(torch.arange(tokens), torch.arange(tokens))
    losses = loss(columns).view(tokens, tokens)
    assert losses.std() > 0.01
    value = p[0] @ losses @ p[1]
    torch.testing.assert_close(found[0], p[0] * (losses @ p[1] - value))
    torch.testing.assert_close(found[1], p[1] * (p[0] @ losses - value))


@pytest.mark.parametrize("kind", ["rloo", "conditional"])
def test_estimated_truths_are_within_four_standard_errors(kind):
    if kind == "rloo":
        truth = rloo_truth(LOSS, LOGITS, 20_000, [hash_seed(str(i)) for i in range(50)])
        assert truth.coordinates is None
    else:
        truth = conditional_truth(LOSS, LOGITS, torch.tensor([1, 4, 6]), 5000, 50, seed=5)
    assert truth.blocks.shape[0] == 50
    assert_compatible(truth.blocks, truth.restrict(EXACT[None])[0])


def test_conditional_truth_is_exact_where_it_has_nothing_to_average():
    """At N = 1 each prompt's loss is known; only L(x) is left to chance, and it is common."""
    weights = normal(V, seed=1)
    loss = hard_loss(DLMI(), toy_slot(LOGITS[:1]), ToyReader(lambda rows: rows[:, 0] @ weights, V))
    truth = conditional_truth(loss, LOGITS[:1], torch.arange(V), 4000, 40, seed=6)
    assert_compatible(truth.blocks, exact_truth(loss, LOGITS[:1]).blocks[0])


def test_hard_prompts_follow_the_distribution():
    columns = sample_prompts(LOGITS, 40_000, 7)
    for position in range(N):
        shares = torch.bincount(columns[:, position], minlength=V) / 40_000
        torch.testing.assert_close(
            shares.double(), torch.softmax(LOGITS, -1)[position], atol=0.01, rtol=0
        )
    assert torch.equal(columns, sample_prompts(LOGITS, 40_000, 7))


def test_losses_of_many_prompts_are_read_a_part_at_a_time():
    class CountingReader(ToyReader):
        sizes = ()

        def __call__(self, passes):
            self.sizes += tuple(asked.count for asked in passes)
            return super().__call__(passes)

    reader = CountingReader(READER.loss, V)
    columns = sample_prompts(LOGITS, 5000, 7)
    losses = hard_loss(DLMI(), toy_slot(LOGITS), reader)(columns)
    assert reader.sizes == (4096, 904)
    torch.testing.assert_close(losses, READER.loss(READER.matrix[columns]))


def test_the_authors_reference_is_a_hundredth_of_the_truth():
    """(4/5) (1/10) (1/8) at S = 8, and noise many times as large in a single one."""
    references = torch.cat(
        [
            as_in_code_reference(
                LOSS, LOGITS, 8, [hash_seed(f"{run}/{call}") for call in range(5)]
            ).blocks
            for run in range(400)
        ]
    )
    assert_compatible(references, 0.01 * EXACT)
    ratios = references @ EXACT / (EXACT @ EXACT)
    error = float(ratios.std()) / 20
    assert abs(float(ratios.mean()) - 0.01) < 4 * error
    assert 4 * error < 0.009
    assert float(ratios.std()) > 0.01
    assert as_in_code_reference(LOSS, LOGITS, 8, range(5)).kind == "as_in_code"


def test_a_fresh_helper_has_no_advantage_at_first():
    columns = sample_columns(LOGITS, 8, 3)
    losses = LOSS(columns)
    average, kept = moving_average("as_code", None, losses.mean())
    gradient = score_function_gradient(LOGITS, columns, losses, "as_code", average)
    assert gradient.abs().max() < 1e-12
    used, _ = moving_average("as_code", kept, torch.tensor(2.0))
    assert 2.0 - float(used) == pytest.approx(0.1 * (2.0 - float(kept)))


def test_against_the_authors_reference_the_order_of_temperatures_turns_round():
    """Their bias is the gradient's own scale: smallest at tau = 100, where the bias is largest."""
    chosen = [ESTIMATORS["gs_tau1"], ESTIMATORS["gs_tau100"]]
    found = {}
    for kind in ("exact", "as_in_code"):
        study = GradientStudy(draws=40, truth=kind, truth_samples=64)
        for m in study.measure(chosen[0], toy_slot(LOGITS), READER, chosen):
            found[kind, m["estimator"]] = m["bias_max"].value
    one, hundred = map(label, chosen)
    assert found["exact", hundred] > found["exact", one]
    assert found["as_in_code", hundred] < 0.1 * found["as_in_code", one]


def test_chosen_logits_are_half_the_largest_and_half_drawn():
    peaked = torch.zeros(2, 50)
    peaked[:, 7] = 9.0
    pilot = torch.zeros(100)
    pilot[[90, 91, 92]] = torch.tensor([3.0, -2.0, 1.0])
    chosen = choose_coordinates(peaked, iter([pilot]), 4, seed=0).tolist()
    assert {90, 91} < set(chosen)
    assert {7, 57} & set(chosen)
    assert len(chosen) == 4
    assert len(choose_coordinates(peaked, iter([pilot]), 1000, seed=0)) == 100
