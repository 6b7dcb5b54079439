"""Products with frozen matrices, stored as PyTorch's libraries for CPUs read them fastest.

A product rearranges its matrix before it multiplies. With few rows that takes longer than the
product itself, and the matrices of a frozen LM are always the same: so they are rearranged once. In
float32 MKL does it, and oneDNN on AMD's CPUs with AVX-512, where MKL keeps to vectors of 256 bits;
in bfloat16 oneDNN does. The results are those of the plain product up to rounding. Where there is
no room for the rearranged matrices, or neither library, products stay plain;
`torch.backends.mkldnn.enabled = False` asks for that.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.pytorch_utils import Conv1D

from dlmi.lm.machine import cpu_facts

_MEMORY_SHARE = 0.25  # of the machine's memory that rearranged matrices may take
_ROWS = 256  # that a matrix is rearranged for; it then takes any number


_are_plain: ContextVar[bool] = ContextVar("are_plain", default=False)


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """Leave packed matrices out, as for counting operations."""
    token = _are_plain.set(True)
    try:
        yield
    finally:
        _are_plain.reset(token)


def use_packed_products(model: nn.Module) -> None:
    """Let the layers of a frozen model on the CPU multiply by packed matrices.

    Its weights stay as they are, and are packed when they are first used.
    """
    layers = [module for module in model.modules() if type(module) in _FROZEN]
    matrices = {id(layer.weight): layer.get_parameter("weight").nbytes for layer in layers}
    size = 2 * sum(matrices.values())  # forward and backward
    if size > _MEMORY_SHARE * psutil.virtual_memory().total:
        return
    for layer in layers:
        layer.__class__ = _FROZEN[type(layer)]


def product(inputs: Tensor, matrix: Tensor) -> Tensor:
    """(r, i) by (i, o) without a graph, for many rows and a matrix that is not packed.

    What oneDNN gains by wider vectors it gains here too.
    """
    takes = _takes(inputs, matrix) and matrix.dtype == torch.float32
    if not (takes and _library(matrix.dtype) == "onednn"):
        return inputs @ matrix
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, matrix.T, None, "none", [], "")
    return found


class _FrozenLinear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if not _takes(inputs, self.weight):
            return super().forward(inputs)
        return _product(inputs, self.weight, self.bias, False)


class _FrozenConv1D(Conv1D):
    """Of GPT-2: its matrix is (in, out)."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not _takes(inputs, self.weight):
            output: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
            return output
        return _product(inputs, self.weight, self.bias, True)


# A subclass may do more than multiply: those stay as they are.
_FROZEN: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _FrozenLinear, Conv1D: _FrozenConv1D}


def _takes(inputs: Tensor, weight: Tensor) -> bool:
    return bool(
        not _are_plain.get()
        and inputs.dtype == weight.dtype
        and _library(weight.dtype) is not None
        and inputs.device.type == weight.device.type == "cpu"
        and inputs.numel() > 0
        and not weight.requires_grad
        and torch.backends.mkldnn.enabled
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None, is_turned: bool) -> Tensor:
    """(.., i) to (.., o) with a matrix, (o, i), or (i, o) if it is turned."""
    if torch.is_grad_enabled() and inputs.requires_grad:
        result: Tensor = _Product.apply(inputs, weight, bias, is_turned)  # type: ignore[no-untyped-call]
        return result
    return _Packed.of(weight, is_turned)(inputs, bias)


class _Product(torch.autograd.Function):
    """Differentiable in its inputs, any number of times."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, is_turned: bool
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.is_turned = is_turned
        return _Packed.of(weight, is_turned)(inputs, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        [weight] = ctx.saved_tensors
        return _product(gradients[0], weight, None, not ctx.is_turned), None, None, None


class _Packed:
    """A frozen matrix as its library reads it."""

    # By weight and by whether it is turned; gone with the weight.
    _known: "tuple[WeakTensorKeyDictionary, WeakTensorKeyDictionary]" = (
        WeakTensorKeyDictionary(),
        WeakTensorKeyDictionary(),
    )

    def __init__(self, weight: Tensor, is_turned: bool, library: str | None) -> None:
        self._library = library
        self._state = weight.data_ptr(), weight._version
        self._plain = weight.detach().T if is_turned else weight.detach()  # (o, i)
        matrix = self._plain.contiguous()
        if library == "onednn":
            self._packed = torch.ops.mkldnn._reorder_linear_weight(matrix, _ROWS)
        else:
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(matrix, _ROWS)

    @classmethod
    def of(cls, weight: Tensor, is_turned: bool) -> "_Packed":
        """Made once, and again if the weight has changed."""
        known = cls._known[is_turned]
        packed: _Packed | None = known.get(weight)  # type: ignore[no-untyped-call]
        if packed is None or packed._state != (weight.data_ptr(), weight._version):
            packed = known[weight] = cls(weight, is_turned, _library(weight.dtype))
        return packed

    def __call__(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        ops, rows = torch.ops, inputs.numel() // inputs.shape[-1]
        inputs = inputs.contiguous()
        product: Tensor
        if self._library == "onednn":
            product = ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], "")
        else:
            product = ops.mkl._mkl_linear(inputs, self._packed, self._plain, bias, rows)
        return product


@functools.cache
def _library(dtype: torch.dtype) -> str | None:
    """`onednn`, `mkl` or None: a rule, no measurement, as runs on one machine must round alike."""
    backends: Any = torch.backends
    is_avx512 = backends.cpu.get_cpu_capability().startswith("AVX512")
    is_amd = "AuthenticAMD" in cpu_facts()["vendor_id"]
    if dtype == torch.bfloat16 or (dtype == torch.float32 and is_amd and is_avx512):
        library = "onednn" if backends.mkldnn.is_available() else None
    else:
        library = "mkl" if dtype == torch.float32 and backends.mkl.is_available() else None
    return library if library and _works(library, dtype) else None


def _works(library: str, dtype: torch.dtype) -> bool:
    """Whether a library gives right products: its operators are PyTorch's own, and may change."""
    matrix = torch.arange(-40.0, 40.0, dtype=dtype).view(16, 5) / 40
    try:
        packed = _Packed(matrix, False, library)
        for rows in (1, 3, 2 * _ROWS):
            inputs = torch.arange(-5.0 * rows, 5.0 * rows, 2, dtype=dtype).view(rows, 5) / rows
            torch.testing.assert_close(packed(inputs), inputs @ matrix.T)
    except (AttributeError, RuntimeError, AssertionError):
        return False
    return True
