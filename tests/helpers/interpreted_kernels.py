"""The Triton kernels under Triton's interpreter; `test_soft_embedding` runs this file."""

import pytest
import torch
import triton.language as tl

from dlmi.estimators.soft_embedding import compare_backends, kernels, soft_embedding
from helpers.soft_rows import CASES, CPU, assert_close, make, with_gradients

# The interpreter is slow: several blocks, the last one narrower, but few rows.
CASES |= {"small": (2, 2, 2, 777, 3, 1.0), "small and cold": (1, 1, 2, 300, 3, 0.02)}


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("case", ["small", "small and cold", "one token", "one position"])
def test_kernels_equal_the_plain_path(monkeypatch, case, noisy):
    logits, tau, matrix, seeds, samples, incoming = make(case, torch.float64)
    problem = (logits, tau, matrix, seeds if noisy else None, samples, incoming)
    expected = with_gradients(soft_embedding, *problem)
    largest = soft_embedding(*problem[:5], hard=True)
    monkeypatch.setattr(kernels, "_COLUMNS", 512)
    monkeypatch.setattr(kernels, "_TILE", tl.constexpr(256))
    monkeypatch.setattr("dlmi.estimators.soft_embedding._backend", lambda logits: kernels)
    assert_close(with_gradients(soft_embedding, *problem), expected, 1e-9)
    assert torch.equal(soft_embedding(*problem[:5], hard=True), largest)


def test_rows_in_another_order_of_memory(monkeypatch):
    logits, tau, matrix, seeds, samples, incoming = make("small", torch.float64)
    problem = (tau, matrix, seeds, samples, incoming)
    expected = with_gradients(soft_embedding, logits, *problem)
    turned = [own.detach().T.contiguous().T.requires_grad_() for own in logits]
    assert not turned[0].is_contiguous()
    monkeypatch.setattr("dlmi.estimators.soft_embedding._backend", lambda logits: kernels)
    assert_close(with_gradients(soft_embedding, turned, *problem), expected, 1e-9)
    with pytest.raises(ValueError, match="contiguous"):
        kernels._launch(None, (1,), turned[0])


def test_self_check_tells_a_wrong_backend_from_a_right_one(monkeypatch):
    assert compare_backends(kernels, CPU) < 1e-4
    right = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *args: (right(*args), args[2].soft.mul_(1.1)))
    assert compare_backends(kernels, CPU) > 1e-3
