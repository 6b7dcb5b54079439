"""Products with packed matrices against plain ones, and when matrices are packed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from dlmi.lm import products
from dlmi.lm.products import product, use_packed_products

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
_WAYS = [(torch.float32, "mkl"), (torch.float32, "onednn"), (torch.bfloat16, "onednn")]


def _require(library):
    backends = {"mkl": torch.backends.mkl, "onednn": torch.backends.mkldnn}
    if not backends[library].is_available():
        pytest.skip(f"this build of PyTorch has no {library}")


@pytest.fixture(params=_WAYS, ids=lambda way: f"{way[1]}-{str(way[0])[6:]}")
def dtype(request, monkeypatch):
    """A dtype whose products a library makes, whatever this machine's rule."""
    dtype, library = request.param
    _require(library)
    monkeypatch.setattr(products, "_library", lambda asked: library if asked == dtype else None)
    return dtype


def _layer(kind, dtype, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias) if kind == "linear" else Conv1D(40, 24)
    return layer.to(dtype).requires_grad_(False)


def _plain(layer, inputs):
    matrix = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
    return F.linear(inputs, matrix, layer.bias)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3), (700,)])
def test_products_and_gradients_are_those_of_plain_matrices(dtype, kind, rows):
    layer = _layer(kind, dtype)
    inputs = torch.randn(*rows, 24, dtype=dtype, requires_grad=True)
    wanted = _plain(layer, inputs)
    by_output = torch.randn_like(wanted)
    [wanted_gradient] = torch.autograd.grad(wanted, inputs, by_output)
    use_packed_products(layer)
    found = layer(inputs)
    [gradient] = torch.autograd.grad(found, inputs, by_output)
    near = {"rtol": _TOLERANCE[dtype], "atol": _TOLERANCE[dtype]}
    torch.testing.assert_close(found, wanted, **near)
    torch.testing.assert_close(gradient, wanted_gradient, **near)
    torch.testing.assert_close(layer(inputs.detach()), wanted.detach(), **near)


def test_gradients_of_gradients_are_those_of_plain_matrices(dtype):
    layer = _layer("linear", dtype, bias=False)
    inputs = torch.randn(3, 24, dtype=dtype, requires_grad=True)

    def curvature():
        [gradient] = torch.autograd.grad(layer(inputs).pow(2).sum(), inputs, create_graph=True)
        return torch.autograd.grad(gradient.sum(), inputs)[0]

    wanted = curvature()
    use_packed_products(layer)
    near = {"rtol": 10 * _TOLERANCE[dtype], "atol": 10 * _TOLERANCE[dtype]}
    torch.testing.assert_close(curvature(), wanted, **near)


def test_a_matrix_that_changes_is_packed_again(dtype):
    layer = _layer("linear", dtype)
    use_packed_products(layer)
    inputs = torch.randn(5, 24, dtype=dtype)
    before = layer(inputs)
    layer.weight.mul_(2)
    near = {"rtol": _TOLERANCE[dtype], "atol": _TOLERANCE[dtype]}
    torch.testing.assert_close(layer(inputs), 2 * before - layer.bias, **near)
    other = copy.deepcopy(layer)
    other.weight.data = -layer.weight
    torch.testing.assert_close(other(inputs), layer.bias - (layer(inputs) - layer.bias), **near)


def test_matrices_are_packed_once_where_there_is_room_for_them(dtype, monkeypatch):
    made = []
    pack = products._Packed.__init__
    monkeypatch.setattr(
        products._Packed, "__init__", lambda self, *given: (made.append(1), pack(self, *given))[0]
    )
    layer, inputs = _layer("linear", dtype), torch.randn(5, 24, dtype=dtype)
    use_packed_products(layer)
    for _ in range(3):
        layer(inputs)
    assert len(made) == 1
    monkeypatch.setattr(products, "_MEMORY_SHARE", 0.0)
    other = _layer("linear", dtype)
    use_packed_products(other)
    assert type(other) is nn.Linear


@pytest.mark.parametrize("rows", [1, 7, 700])
def test_products_with_a_block_of_a_matrix_are_plain_products(dtype, rows):
    torch.manual_seed(0)
    matrix, near = torch.randn(90, 24, dtype=dtype), _TOLERANCE[dtype]
    inputs, weights = torch.randn(rows, 24, dtype=dtype), torch.rand(rows, 50, dtype=dtype)
    block = matrix[30:80]
    torch.testing.assert_close(product(inputs, block.T), inputs @ block.T, rtol=near, atol=near)
    torch.testing.assert_close(product(weights, block), weights @ block, rtol=near, atol=near)


def test_a_library_that_is_wrong_or_missing_is_not_used(dtype, monkeypatch):
    library = products._library(dtype)
    assert products._works(library, dtype)
    call = products._Packed.__call__
    monkeypatch.setattr(products._Packed, "__call__", lambda self, *given: call(self, *given) + 1)
    assert not products._works(library, dtype)

    def missing(*_):
        raise AttributeError

    monkeypatch.setattr(products._Packed, "__call__", missing)
    assert not products._works(library, dtype)


def test_what_is_trained_or_in_another_dtype_is_multiplied_plainly(dtype, monkeypatch):
    def refuse(*_):
        raise AssertionError

    layer, inputs = _layer("linear", dtype), torch.randn(5, 24, dtype=dtype)
    wanted = _plain(layer, inputs)
    use_packed_products(layer)
    monkeypatch.setattr(products, "_product", refuse)
    with pytest.raises(AssertionError):
        layer(inputs)
    layer.requires_grad_(True)
    layer(inputs).sum().backward()
    assert layer.weight.grad is not None
    layer.requires_grad_(False).double()
    assert layer(inputs.double()).dtype == torch.float64
    layer.to(dtype)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    torch.testing.assert_close(layer(inputs), wanted)


def test_an_lm_multiplies_by_packed_matrices(model_folder, monkeypatch):
    from dlmi import load_lm

    _require("mkl")
    monkeypatch.setattr(products, "_library", lambda dtype: "mkl")
    lm = load_lm(str(model_folder()), dtype="float32")
    before = {name: weight.clone() for name, weight in lm.model.state_dict().items()}
    ids = torch.arange(4, 12)[None]
    packed = lm.last_logits(lm.embed(ids), 3)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    torch.testing.assert_close(packed, lm.last_logits(lm.embed(ids), 3), rtol=1e-4, atol=1e-5)
    assert any(type(module) is products._FrozenLinear for module in lm.model.modules())
    assert all(torch.equal(before[name], w) for name, w in lm.model.state_dict().items())
