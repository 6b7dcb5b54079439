"""Draws: the gradient that a step of a method would use, at somebody else's Z and Phi."""

import dataclasses

import pytest
import torch
from helpers.toy_slot import normal, quadratic, toy_slot

from dlmi import InputError
from dlmi.gradients.callback import GradientStudy
from dlmi.gradients.estimators import (
    ESTIMATORS,
    DrawSlot,
    along,
    draw_gradients,
    hard_loss,
    label,
    state_along,
)
from dlmi.gradients.truth import exact_truth, sample_prompts
from dlmi.methods import DLMI, GBDA, REINFORCE
from dlmi.methods.reinforce import REINFORCEState
from dlmi.scoring.passes import Account, advance

N, V = 2, 4
LOGITS, PHI, READER = normal(N, V), normal(N, seed=3), quadratic(N, V)
EXACT = exact_truth(hard_loss(DLMI(), toy_slot(LOGITS), READER), LOGITS).blocks[0]
AVERAGE = torch.tensor(0.3, dtype=torch.float64)


def state_of(method):
    return state_along(DLMI(), None, method, lambda: AVERAGE)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_draw_is_the_gradient_of_a_step_and_leaves_the_run_alone(name):
    method = dataclasses.replace(ESTIMATORS[name], num_samples=3)
    slot, state = toy_slot(LOGITS, PHI), state_of(method)
    before = slot.rng.get_state()
    torch.manual_seed(0)
    global_before = torch.get_rng_state()
    one, other = draw_gradients(method, state, slot, [1, 2], READER)
    [again] = draw_gradients(method, state, slot, [1], READER)
    torch.testing.assert_close(one, again, rtol=1e-12, atol=1e-15)
    assert not torch.allclose(one, other)
    assert one.view(N, V).sum(-1).abs().max() < 1e-9  # along a constant no softmax changes
    assert torch.equal(slot.params["Z"], LOGITS)
    assert torch.equal(slot.params["Phi"], PHI)
    assert slot.params["Z"].grad is None
    assert slot.params["Phi"].grad is None
    assert slot.cost.total == 0
    assert torch.equal(slot.rng.get_state(), before)
    assert torch.equal(torch.get_rng_state(), global_before)
    # The same by hand: a slot of the method's own tensors, and the optimiser's way to a gradient.
    phi = {"shared": PHI.mean(), "decoupled": PHI}.get(getattr(method, "temperature", "fixed"))
    own = toy_slot(LOGITS, phi)
    own.seed = lambda purpose="": slot.seed(f"gradients/{label(method)}/1")
    [outcome] = advance([method.step(own, state)], READER, [Account()])
    outcome.value[0].loss.backward()
    torch.testing.assert_close(own.params["Z"].grad.flatten(), one)


def test_unbiased_estimators_hit_the_truth():
    for name in ("reinforce", "rloo"):
        method = ESTIMATORS[name]
        draws = draw_gradients(method, state_of(method), toy_slot(LOGITS), range(1000), READER)
        error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - EXACT).abs() < 4 * error).all()


def tau_of(name, slot):
    method = ESTIMATORS[name]
    return method.soft_prompt(DrawSlot.of(slot, method, "draw"), None).tau


def test_temperatures_follow_phi_under_their_own_scale():
    phi = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    law, shared = 1 + torch.tanh(phi), (1 + torch.tanh(phi.mean())).expand(2)
    slot = toy_slot(LOGITS, phi)
    torch.testing.assert_close(tau_of("gs_tau100", slot), torch.full_like(phi, 100.0))
    torch.testing.assert_close(tau_of("gs_decoupled_tau100", slot), 100 * law)
    torch.testing.assert_close(tau_of("gs_shared_tau1", slot), shared)
    shared_run = toy_slot(LOGITS, phi.mean())
    torch.testing.assert_close(tau_of("gs_shared_tau1", shared_run), shared)
    torch.testing.assert_close(tau_of("gs_decoupled_tau1", shared_run), shared)
    fixed_run = toy_slot(LOGITS)
    for name in ("gs_shared_tau100", "gs_decoupled_tau100"):
        torch.testing.assert_close(tau_of(name, fixed_run), torch.full_like(phi, 100.0))


def test_the_moving_average_is_the_runs_own_or_that_of_pilots():
    kept, ema, rloo = torch.tensor(7.0), ESTIMATORS["reinforce"], ESTIMATORS["rloo"]

    def average(run, run_state, method=ema):
        return state_along(run, run_state, method, lambda: AVERAGE).average

    assert average(REINFORCE(lr=0.3), REINFORCEState(kept)) is kept
    assert average(REINFORCE(), REINFORCEState()) is AVERAGE  # before the first step
    assert average(rloo, REINFORCEState(kept)) is AVERAGE
    assert average(DLMI(), None) is AVERAGE
    assert average(REINFORCE(), REINFORCEState(kept), rloo) is None
    assert state_along(DLMI(), None, ESTIMATORS["gs_tau1"], lambda: AVERAGE) is None


def test_pilots_are_drawn_with_a_seed_of_their_own():
    """What `ema` subtracts along another's run: the mean loss of 4 S prompts."""
    run, slot = ESTIMATORS["gs_tau1"], toy_slot(LOGITS)
    loss = hard_loss(run, slot, READER)
    average = loss(sample_prompts(LOGITS, 32, slot.seed("gradients/average"))).mean()
    ema = ESTIMATORS["reinforce"]
    draws = draw_gradients(ema, REINFORCEState(average), slot, range(3), READER)
    [found] = GradientStudy(draws=3).measure(run, slot, READER, [ema], with_truth=False)
    assert found["variance_max"].value == pytest.approx(float(draws.var(0).max()))
    assert found["tau"] is None


def test_labels_tell_estimators_apart():
    labels = {label(method) for method in ESTIMATORS.values()}
    assert labels == {
        *("REINFORCE", "RLOO", "ST tau=1", "Gumbel-Rao tau=1", "ReinMax tau=1"),
        *("GS tau=1", "GS tau=100", "GS L tau0=1", "GS L tau0=100", "GS D+L tau0=1"),
        "GS D+L tau0=100",
    }
    assert label(GBDA(tau=2.5)) == "GS tau=2.5"


def test_estimators_take_loss_decode_and_samples_of_the_run():
    run = GBDA(num_samples=3, teacher_forcing=True, loss="hinge")
    for method in ESTIMATORS.values():
        found = along(run, method)
        assert (found.num_samples, found.teacher_forcing, found.loss) == (3, True, "hinge")
        assert label(found) == label(method)
    with pytest.raises(InputError, match="study.estimators. to be without RLOO.*at least 2"):
        along(DLMI(num_samples=1), ESTIMATORS["rloo"])
