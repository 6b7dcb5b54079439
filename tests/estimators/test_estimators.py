"""Each estimator against enumeration, in float64 on a handful of tokens."""

import itertools

import pytest
import torch

from dlmi.estimators import soft_prompt
from dlmi.estimators.noise import gumbel_noise
from dlmi.estimators.sampling import (
    _conditional_perturbation,
    gumbel_softmax,
    reinmax,
    with_forward,
)
from dlmi.estimators.score_function import sample_log_probs, score_function_surrogate
from dlmi.estimators.soft_embedding import sample_columns
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds

N, V = 2, 3
TAU = torch.tensor([0.7, 1.3], dtype=torch.float64)
CPU = torch.device("cpu")


def sample_rows(name, num_samples, logits, tau, seed, rao_draws=10):
    """Rows themselves: embeddings under the identity, (S, N, V)."""
    matrix = torch.eye(logits.shape[-1], dtype=logits.dtype)
    prompt = SoftPrompt(logits, tau, name, num_samples, seed, rao_draws)
    return soft_embeds([prompt], matrix)[0]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


LOGITS = torch.randn(N, V, dtype=torch.float64, generator=generator())
WEIGHTS = torch.randn(N * V, N * V, dtype=torch.float64, generator=generator(1))


def objective(rows):
    """A quadratic form of the stacked rows: (..., N, V) to (...)."""
    flat = rows.flatten(-2)
    return torch.einsum("...i,ij,...j->...", flat, WEIGHTS, flat)


def cubic(rows):
    return objective(rows) * (rows * LOGITS.cos()).sum((-1, -2))


def all_prompts():
    return torch.tensor(list(itertools.product(range(V), repeat=N)))  # (V^N, N)


def one_hot(columns):
    return torch.nn.functional.one_hot(columns, V).double()


def exact_gradient(function):
    """Of E over x ~ softmax(Z) of function(onehot x), by enumeration."""
    logits = LOGITS.clone().requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    prompts = all_prompts()
    probabilities = log_p.expand(len(prompts), -1, -1).gather(-1, prompts[..., None]).sum((1, 2))
    (probabilities.exp() * function(one_hot(prompts))).sum().backward()
    return logits.grad


def sampled_gradients(name, function, repeats=50, samples=80):
    """Independent gradients, each a mean over some samples, (repeats, N, V)."""
    gradients = []
    for seed in range(repeats):
        logits = LOGITS.clone().requires_grad_()
        rows = sample_rows(name, samples, logits, TAU, 2 * seed, rao_draws=20)
        function(rows).mean().backward()
        gradients.append(logits.grad)
    return torch.stack(gradients)


def score_gradients(function, baseline, average, repeats, samples=4):
    """Independent score-function gradients, each of some samples, (repeats, N, V)."""
    columns = sample_columns(LOGITS, repeats * samples, 0).view(repeats, samples, N)

    def surrogate(logits, columns, losses):
        log_probs = sample_log_probs(logits, columns)
        return score_function_surrogate(losses, log_probs, baseline, average)

    gradients = torch.func.vmap(torch.func.grad(surrogate), in_dims=(None, 0, 0))
    return gradients(LOGITS, columns, function(one_hot(columns)))


def assert_mean_is(gradients, expected, errors=4.0):
    standard_error = gradients.std(0) / len(gradients) ** 0.5
    assert ((gradients.mean(0) - expected).abs() < errors * standard_error + 1e-12).all()


@pytest.mark.parametrize("baseline", ["ema", "rloo", "none"])
@pytest.mark.parametrize("function", [objective, cubic])
def test_score_function_is_unbiased(baseline, function):
    average = function(one_hot(all_prompts())).mean()  # any constant leaves it unbiased
    assert_mean_is(score_gradients(function, baseline, average, 3000), exact_gradient(function))


def test_as_code_is_the_gradient_over_the_number_of_samples():
    """Batch-mean loss times batch-mean log-probability gives 1/S of the gradient on average."""
    gradients = score_gradients(objective, "as_code", torch.zeros(()), 6000, samples=4)
    assert_mean_is(gradients, exact_gradient(objective) / 4)


def test_rloo_has_less_variance_than_no_baseline():
    rloo, none = (
        score_gradients(lambda rows: objective(rows) + 10, baseline, torch.zeros(()), 800)
        for baseline in ("rloo", "none")
    )
    assert rloo.var(0).sum() < 0.3 * none.var(0).sum()


def test_gumbel_softmax_tends_to_the_exact_gradient_as_tau_falls():
    expected = exact_gradient(cubic)

    def bias(tau):
        noise = gumbel_noise(8, (400_000, N, V), CPU, torch.float64)
        logits = LOGITS.clone().requires_grad_()
        rows = gumbel_softmax(logits, torch.full((N,), tau, dtype=torch.float64), noise)
        cubic(rows).mean().backward()
        return float((logits.grad - expected).norm() / expected.norm())

    biases = [bias(tau) for tau in (3.0, 1.0, 0.3, 0.05)]
    assert biases == sorted(biases, reverse=True)
    assert biases[-1] < 0.05


def test_straight_through_forward_is_one_hot_and_backward_is_gumbel_softmax():
    incoming = torch.randn(5, N, V, dtype=torch.float64, generator=generator(10))
    gradients = []
    for name in ("straight_through", "gumbel_softmax"):
        logits, tau = LOGITS.clone().requires_grad_(), TAU.clone().requires_grad_()
        rows = sample_rows(name, 5, logits, tau, seed=9)
        (rows * incoming).sum().backward()
        gradients.append((logits.grad, tau.grad))
    torch.testing.assert_close(*gradients)
    rows = sample_rows("straight_through", 5, LOGITS, TAU, seed=9)
    noise = gumbel_noise(9, (5, N, V), CPU, torch.float64)
    assert torch.equal(rows, one_hot((LOGITS + noise).argmax(-1)))


def test_conditional_noise_has_the_distribution_of_noise_that_chose_so():
    """Joint moments of (Z + g) given argmax = D, against rejection sampling."""
    logits = LOGITS[:1]
    perturbed = logits + gumbel_noise(11, (400_000, 1, V), CPU, torch.float64)
    for chosen in range(V):
        wanted = perturbed[perturbed.argmax(-1)[:, 0] == chosen][:, 0]
        noise = gumbel_noise(12, (100_000, 1, V), CPU, torch.float64)[:, None]
        drawn = _conditional_perturbation(logits, torch.tensor([[chosen]]), noise)[:, 0, 0]
        assert (drawn.argmax(-1) == chosen).all()
        error = (wanted.var(0) / len(wanted) + drawn.var(0) / len(drawn)).sqrt()
        assert ((wanted.mean(0) - drawn.mean(0)).abs() < 4 * error).all()
        torch.testing.assert_close(wanted.std(0), drawn.std(0), rtol=0.03, atol=0)


def test_gumbel_rao_has_the_mean_of_straight_through_and_less_variance():
    rao, plain = (sampled_gradients(n, objective) for n in ("gumbel_rao", "straight_through"))
    error = ((rao.var(0) + plain.var(0)) / len(rao)).sqrt()
    assert ((rao.mean(0) - plain.mean(0)).abs() < 4 * error).all()
    assert rao.var(0).sum() < 0.8 * plain.var(0).sum()


def reinmax_by_hand(logits, tau, chosen, incoming):
    """The published formula: 2 J(pi_D) g - J(pi) g / 2."""

    def jacobian_times(p):
        return p * (incoming - (p * incoming).sum(-1, keepdim=True))

    middle = (torch.softmax(logits / tau[:, None], -1) + one_hot(chosen)) / 2
    return 2 * jacobian_times(middle) - jacobian_times(torch.softmax(logits, -1)) / 2


@pytest.mark.parametrize("tau", [1.0, 1.7])
def test_reinmax_is_the_published_formula(tau):
    tau = torch.full((N,), tau, dtype=torch.float64)
    for chosen in all_prompts():
        incoming = torch.randn(N, V, dtype=torch.float64, generator=generator(14))
        logits = LOGITS.clone().requires_grad_()
        rows = reinmax(logits, tau, chosen[None])
        assert torch.equal(rows[0], one_hot(chosen))
        (rows[0] * incoming).sum().backward()
        torch.testing.assert_close(logits.grad, reinmax_by_hand(LOGITS, tau, chosen, incoming))


def test_reinmax_is_exact_for_quadratics_of_one_position():
    """Second order: its mean over D, enumerated, is the true gradient of a quadratic."""
    weights = torch.randn(V, V, dtype=torch.float64, generator=generator(15))

    def quadratic(row):
        return row @ weights @ row

    logits = LOGITS[:1]
    probabilities = torch.softmax(logits, -1)[0]
    exact = torch.zeros(V, dtype=torch.float64)
    mean = torch.zeros(V, dtype=torch.float64)
    for value in range(V):
        row = one_hot(torch.tensor(value))
        jacobian = row - probabilities
        exact += probabilities[value] * quadratic(row) * jacobian
        leaf = logits.clone().requires_grad_()
        draw = reinmax(leaf, torch.ones(1, dtype=torch.float64), torch.tensor([[value]]))
        quadratic(draw[0, 0]).backward()
        mean += probabilities[value] * leaf.grad[0]
    torch.testing.assert_close(mean, exact)


@pytest.mark.parametrize("name", ["gumbel_softmax", "straight_through", "gumbel_rao", "reinmax"])
def test_rows_sum_to_one_and_follow_the_seed(name):
    rows = [sample_rows(name, 6, LOGITS, TAU, seed) for seed in (16, 16, 17)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert rows[0].shape == (6, N, V)
    torch.testing.assert_close(rows[0].sum(-1), torch.ones(6, N, dtype=torch.float64))


@pytest.mark.parametrize("name", ["straight_through", "gumbel_rao", "reinmax"])
def test_extreme_logits_stay_finite(name):
    logits = torch.tensor([[300.0, -300.0, 0.0]], requires_grad=True)
    rows = sample_rows(name, 4, logits, torch.ones(1), seed=17)
    rows.square().sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", ["gumbel_rao", "reinmax"])
def test_positions_held_at_once_change_nothing(name, monkeypatch):
    """Cut into single positions, rows and gradients are those of all positions together."""
    incoming = torch.randn(4, N, V, dtype=torch.float64, generator=generator(19))
    results = []
    for held in (2**22, 1):
        monkeypatch.setattr(soft_prompt, "_HELD_ENTRIES", held)
        logits, tau = LOGITS.clone().requires_grad_(), TAU.clone().requires_grad_()
        rows = sample_rows(name, 4, logits, tau, seed=3)
        (rows * incoming).sum().backward()
        results.append((rows.detach(), logits.grad, tau.grad))
    torch.testing.assert_close(*results)


def test_with_forward_gives_value_and_passes_gradient():
    surrogate = torch.randn(3, generator=generator(18), requires_grad=True)
    value = torch.tensor([1.0, 2.0, 3.0])
    result = with_forward(surrogate, value)
    assert torch.equal(result, value)
    (result * value).sum().backward()
    assert torch.equal(surrogate.grad, value)
