r"""Soft prompts without their distributions: softmax((Z + g) / tau) E, block by block.

S samples of N rows over V tokens would fill several S x N x V tensors. Here the vocabulary is
walked in blocks, and only each row's largest entry, its sum and the result :math:`h = p E` are
kept. The backward pass makes the noise again from its counter. With :math:`x = (Z + g) / \tau` and
G the gradient that arrives at h,

.. math::
    \frac{\partial L}{\partial Z} = \sum_s \frac{p}{\tau} (G E^T - G \cdot h), \quad
    \frac{\partial L}{\partial \tau} = - \sum_{s, v} \frac{p x}{\tau} (G E^T - G \cdot h),

so that no row has to be seen twice. A logit of -inf bars its token: its weight and its gradient are
exactly 0. Sums are float32 or better, whatever the LM's dtype.

`plain` does it with PyTorch alone, on any device; `kernels` has Triton kernels for CUDA and ROCm,
used where Triton is installed. Both walk the same groups of rows (`rows`) and draw the same noise.

Axes: B slots, S samples, N positions, V tokens, d width; a row is one (slot, sample, position).
"""

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from dlmi.errors import first_line
from dlmi.estimators.noise import row_keys
from dlmi.estimators.soft_embedding import plain
from dlmi.estimators.soft_embedding.rows import RowSums, row_groups


def soft_embedding(
    logits: Sequence[Tensor],
    tau: Tensor,
    matrix: Tensor,
    seeds: Sequence[int] | None = None,
    num_samples: int = 1,
    hard: bool = False,
) -> Tensor:
    """Embeddings of relaxed prompts, (B, S, N, d), differentiable in the logits and tau.

    Args:
        logits: Z of each slot, B tensors (N, V); -inf bars a token.
        tau: Temperatures, (B, N).
        matrix: What each token embeds to, E (V, d), in any floating dtype.
        seeds: A noise seed for each slot; None for rows without noise.
        num_samples: S.
        hard: Straight-through: the embedding of the largest entry, with the soft one's gradient.
    """
    keys = None
    if seeds is not None:
        keys = row_keys(seeds, num_samples, range(tau.shape[1]), tau.device)
    rows = [own.contiguous() for own in logits]  # kernels walk them so
    embeds: Tensor = _SoftEmbedding.apply(matrix, tau, keys, num_samples, hard, *rows)  # type: ignore[no-untyped-call]
    return embeds


@torch.no_grad()
def sample_columns(logits: Tensor, num_samples: int, seed: int) -> Tensor:
    """S independent draws of a column per position from softmax(logits): (N, V) to (S, N)."""
    tau = logits.new_ones(1, len(logits))
    keys = row_keys([seed], num_samples, range(len(logits)), logits.device)
    groups = row_groups([logits], tau, keys, num_samples)
    return torch.cat([plain.largest_columns(g) for g in groups]).view(num_samples, len(logits))


class _SoftEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        matrix: Tensor,
        tau: Tensor,
        keys: Tensor | None,
        num_samples: int,
        hard: bool,
        *logits: Tensor,
    ) -> Tensor:
        backend = _backend(logits[0])
        sums = RowSums.empty(len(logits) * num_samples * tau.shape[1], matrix.shape[1], logits[0])
        # Autocast is for the LM: a bfloat16 product here would round the gradient of Z away.
        with torch.autocast(matrix.device.type, enabled=False):
            for group in row_groups(logits, tau, keys, num_samples):
                backend.forward(group, matrix, sums.part(group.span), hard)
        ctx.save_for_backward(matrix, tau, keys, sums.soft, sums.peak, sums.total, *logits)
        ctx.num_samples = num_samples
        embeds = matrix[sums.largest].to(sums.soft.dtype) if hard else sums.soft
        return embeds.view(len(logits), num_samples, tau.shape[1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        matrix, tau, keys, soft, peak, total, *logits = ctx.saved_tensors
        backend = _backend(logits[0])
        sums = RowSums(soft, peak, total, peak)
        arriving = gradient.reshape(soft.shape)
        logit_gradients = [torch.zeros_like(z) for z in logits]
        tau_gradient = torch.zeros_like(tau) if ctx.needs_input_grad[1] else None
        with torch.autocast(matrix.device.type, enabled=False):
            for group in row_groups(logits, tau, keys, ctx.num_samples):
                part, by_part = sums.part(group.span), arriving[group.span]
                backend.backward(group, matrix, part, by_part, logit_gradients, tau_gradient)
        return None, tau_gradient, None, None, None, *logit_gradients


def _backend(logits: Tensor) -> ModuleType:
    # ROCm devices call themselves cuda, too.
    has_kernels = logits.is_cuda and find_spec("triton") is not None
    return _checked_kernels(logits.device) if has_kernels else plain


@functools.cache
def _checked_kernels(device: torch.device) -> ModuleType:
    """The Triton kernels, if on this device they give what `plain` gives; else `plain`."""
    try:
        from dlmi.estimators.soft_embedding import kernels

        difference = compare_backends(kernels, device)
        if difference < 1e-3:
            return kernels
        reason = f"they differ from PyTorch by {difference:.1e}"
    except Exception as error:  # a compiler on an unknown device may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
    rank_zero_warn(f"PyTorch is used in place of Triton kernels on {device}: {reason}")
    return plain


@torch.no_grad()
def compare_backends(backend: ModuleType, device: torch.device) -> float:
    """The largest difference of a backend from `plain` over results and gradients."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3000, generator=generator).to(device)
    logits[:, :1100] = -torch.inf  # barred: more than a tile of them
    matrix = torch.randn(3000, 16, generator=generator).to(device)
    tau = torch.tensor([[0.5, 1.0, 20.0]], device=device)
    results = []
    for candidate in (plain, backend):
        [group] = row_groups([logits], tau, row_keys([7], 2, range(3), device), 2)
        sums = RowSums.empty(6, 16, logits)
        candidate.forward(group, matrix, sums, True)
        gradients = [torch.zeros_like(logits)]
        tau_gradient = torch.zeros_like(tau)
        candidate.backward(group, matrix, sums, sums.soft.cos(), gradients, tau_gradient)
        results.append([sums.soft, sums.largest, *gradients, tau_gradient])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
