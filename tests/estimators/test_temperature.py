import numpy as np
import pytest
import torch
from scipy import stats

from dlmi.estimators.noise import gumbel_noise
from dlmi.estimators.sampling import gumbel_softmax
from dlmi.estimators.temperature import row_entropy, temperature_law

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_temperature_law_against_numpy():
    phi = torch.linspace(-4, 4, 17, dtype=torch.float64)
    expected = 1e-10 + 100 * (1 + np.tanh(phi.numpy()))
    np.testing.assert_allclose(temperature_law(phi, 100.0).numpy(), expected, rtol=1e-14)


def test_temperature_stays_positive_and_below_twice_tau0():
    phi = torch.tensor([-1e4, -20.0, 0.0, 20.0, 1e4])
    tau = temperature_law(phi, 3.0)
    assert (tau > 0).all()
    assert (tau <= 6.0 + 1e-6).all()
    assert tau[2] == 3.0


@pytest.mark.parametrize("tau_shape", [(3,), ()])
def test_gumbel_softmax_against_numpy(tau_shape):
    logits = torch.randn(3, 7, dtype=torch.float64, generator=generator())
    noise = gumbel_noise(1, (4, 3, 7), CPU, torch.float64)
    tau = torch.rand(tau_shape, dtype=torch.float64, generator=generator(2)) + 0.1
    scaled = (logits.numpy() + noise.numpy()) / tau.numpy()[..., None]
    scaled = np.exp(scaled - scaled.max(-1, keepdims=True))
    expected = scaled / scaled.sum(-1, keepdims=True)
    np.testing.assert_allclose(gumbel_softmax(logits, tau, noise).numpy(), expected, rtol=1e-12)


def test_gradients_of_logits_and_phi_by_finite_differences():
    logits = torch.randn(2, 5, dtype=torch.float64, generator=generator(), requires_grad=True)
    phi = torch.randn(2, dtype=torch.float64, generator=generator(1), requires_grad=True)
    noise = gumbel_noise(2, (3, 2, 5), CPU, torch.float64)

    def rows(logits, phi):
        return gumbel_softmax(logits, temperature_law(phi, 2.0), noise)

    assert torch.autograd.gradcheck(rows, (logits, phi))


def test_gumbel_max_draws_from_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    noise = gumbel_noise(4, (40_000, 1, 3), CPU, torch.float32)
    rows = gumbel_softmax(logits, torch.tensor([0.5]), noise)
    counts = torch.bincount(rows.argmax(-1).flatten(), minlength=3)
    expected = torch.softmax(logits[0].double(), -1).numpy() * 40_000
    assert stats.chisquare(counts.numpy(), expected).pvalue > 1e-3


def test_extreme_temperatures_stay_finite():
    logits = torch.randn(2, 50, generator=generator(), requires_grad=True)
    noise = gumbel_noise(1, (1, 2, 50), CPU, torch.float32)
    rows = gumbel_softmax(logits, torch.tensor([1e-10, 1e6]), noise)
    assert rows.sum(-1).allclose(torch.ones(1, 2))
    assert rows[0, 0].max() == 1
    assert rows[0, 1].max() < 0.0201
    rows.square().sum().backward()
    assert logits.grad.isfinite().all()


def test_row_entropy_of_known_rows():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    entropy = row_entropy(logits, torch.tensor([1.0, 1.0]))
    assert entropy.allclose(torch.tensor([np.log(4.0), 0.0], dtype=torch.float32), atol=1e-6)
