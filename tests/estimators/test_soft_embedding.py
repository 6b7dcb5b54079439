"""The soft embedding against the plain formula, and its promise to hold no S x N x V tensor."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.soft_rows import CASES, CPU, assert_close, make, with_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlmi.bench.timing import peak_of
from dlmi.estimators.noise import column_words, gumbel_noise
from dlmi.estimators.sampling import gumbel_softmax
from dlmi.estimators.soft_embedding import plain, rows, sample_columns, soft_embedding


def textbook(logits, tau, matrix, seeds, samples):
    """softmax((Z + g) / tau) @ E as it is written."""
    embeds = []
    for index, z in enumerate(logits):
        noise = torch.zeros(samples, *z.shape, dtype=z.dtype)
        if seeds is not None:
            noise = gumbel_noise(seeds[index], noise.shape, CPU, z.dtype)
        embeds.append(gumbel_softmax(z, tau[index], noise) @ matrix)
    return torch.stack(embeds)


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_formula_in_float64(case, noisy):
    logits, tau, matrix, seeds, samples, incoming = make(case, torch.float64)
    seeds = seeds if noisy else None
    problem = (logits, tau, matrix, seeds, samples, incoming)
    assert_close(
        with_gradients(soft_embedding, *problem), with_gradients(textbook, *problem), 1e-10
    )


@pytest.mark.parametrize("case", [case for case in CASES if case != "low temperature"])
def test_equals_the_plain_formula_in_float32(case):
    """Against the float64 truth: what float32 arithmetic loses is all that may be lost."""
    single = make(case, torch.float32)
    logits, tau, matrix, seeds, samples, incoming = single
    truth = (
        [z.detach().double().requires_grad_() for z in logits],
        tau.detach().double().requires_grad_(),
        matrix.double(),
        seeds,
        samples,
        incoming.double(),
    )
    ours, expected = with_gradients(soft_embedding, *single), with_gradients(textbook, *truth)
    assert_close(ours[:-1], expected[:-1], 1e-5)
    # Of tau's gradient large terms cancel: as close as the plain formula in float32, or closer.
    loss = (ours[-1].double() - expected[-1]).norm()
    plain_loss = (with_gradients(textbook, *single)[-1].double() - expected[-1]).norm()
    assert loss <= 1e-5 * expected[-1].norm() + plain_loss


def test_gradcheck():
    logits = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([[0.7, 1.9]], dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(9, 3, dtype=torch.float64)

    def embeds(z, tau):
        return soft_embedding([z], tau, matrix, [3], 4)

    assert torch.autograd.gradcheck(embeds, (logits, tau))


def test_hard_goes_backward_as_the_soft_one():
    logits, tau, matrix, seeds, samples, incoming = make("odd sizes", torch.float64)
    gradients = []
    for hard in (False, True):
        embeds = soft_embedding(logits, tau, matrix, seeds, samples, hard)
        gradients.append(torch.autograd.grad((embeds * incoming).sum(), [*logits, tau]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [1e-10, 1e-4, 1e6, 1e30])
def test_extreme_temperatures(tau, dtype):
    logits = torch.randn(3, 600, dtype=dtype, requires_grad=True)
    taus = torch.full((1, 3), tau, dtype=dtype, requires_grad=True)
    matrix = torch.randn(600, 5, dtype=dtype)
    embeds = soft_embedding([logits], taus, matrix, [1], 2)
    largest = sample_columns(logits, 2, 1)
    wanted = matrix[largest] if tau < 1 else matrix.mean(0).expand(2, 3, 5)
    torch.testing.assert_close(embeds[0], wanted, rtol=1e-3, atol=1e-4)
    embeds.square().sum().backward()
    assert logits.grad.isfinite().all()
    assert taus.grad.isfinite().all()


def test_hard_goes_forward_as_the_largest_entry():
    logits, tau, matrix, seeds, samples, _ = make("odd sizes", torch.float64)
    embeds = soft_embedding(logits, tau, matrix, seeds, samples, hard=True)
    for slot, z in enumerate(logits):
        perturbed = z + gumbel_noise(seeds[slot], (samples, *z.shape), CPU, z.dtype)
        assert torch.equal(embeds[slot], matrix[perturbed.argmax(-1)])
        assert torch.equal(sample_columns(z, samples, seeds[slot]), perturbed.argmax(-1))


def test_a_slot_does_not_feel_its_neighbours():
    logits, tau, matrix, seeds, samples, _ = make("odd sizes", torch.float64)
    together = soft_embedding(logits, tau, matrix, seeds, samples)
    for slot, z in enumerate(logits):
        alone = soft_embedding([z], tau[slot : slot + 1], matrix, [seeds[slot]], samples)
        torch.testing.assert_close(together[slot], alone[0])


def test_sums_are_float32_whatever_the_matrix_is():
    logits, tau, matrix, seeds, samples, incoming = make("middling", torch.float32)
    halved = matrix.bfloat16()
    ours = with_gradients(soft_embedding, logits, tau, halved, seeds, samples, incoming)
    wanted = with_gradients(soft_embedding, logits, tau, halved.float(), seeds, samples, incoming)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        cast = with_gradients(soft_embedding, logits, tau, halved, seeds, samples, incoming)
    assert all(torch.equal(a, b) for a, b in zip(cast, wanted, strict=True))


class Allocations(TorchDispatchMode):
    """The size of the largest tensor that an operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("hard", [False, True])
def test_no_tensor_is_as_large_as_the_distribution(hard):
    samples, positions, tokens, width = 8, 20, 20_000, 16
    logits = torch.randn(positions, tokens, requires_grad=True)
    tau = torch.ones(1, positions, requires_grad=True)
    matrix = torch.randn(tokens, width)
    with Allocations() as made:
        embeds = soft_embedding([logits], tau, matrix, [0], samples, hard)
        torch.autograd.grad(embeds.sum(), [logits, tau])
    own = max(4 * positions * tokens, 4 * tokens * width)  # the gradient of Z, or E
    assert made.largest <= max(own, 2 * 4 * plain._BLOCK)
    assert made.largest < 4 * samples * positions * tokens / 4


def test_what_is_held_at_once_does_not_grow_with_samples():
    """Beyond the gradient of Z: a few blocks, and d numbers per row."""
    positions, tokens, width = 20, 50_000, 16
    logits = torch.randn(positions, tokens, requires_grad=True)
    tau = torch.ones(1, positions, requires_grad=True)
    matrix = torch.randn(tokens, width)
    column_words(tokens, CPU)  # kept from call to call

    def peak(samples):
        def step():
            embeds = soft_embedding([logits], tau, matrix, [0], samples)
            torch.autograd.grad(embeds.sum(), [logits, tau])

        return peak_of(step, CPU) - 4 * positions * tokens

    few, many = peak(2), peak(16)
    assert many < 6 * 4 * plain._BLOCK  # the distribution itself would be 64 MB
    assert many < 1.2 * few


@pytest.mark.parametrize(("slots", "samples", "positions"), [(1, 1, 1), (7, 8, 10), (2, 40, 90)])
def test_groups_cover_every_row_once(slots, samples, positions):
    logits = [torch.zeros(positions, 3) for _ in range(slots)]
    groups = list(rows.row_groups(logits, torch.ones(slots, positions), None, samples))
    covered = [(slot, s) for group in groups for slot, own in group.parts for s in own]
    assert covered == [(b, s) for b in range(slots) for s in range(samples)]
    assert groups[0].span.start == 0
    assert groups[-1].span.stop == slots * samples * positions
    assert max(group.rows for group in groups) <= max(1024, positions)


# ---- the Triton kernels: their arithmetic interpreted, their code compiled; no GPU is needed


def test_interpreted_kernels():
    """In a process of its own: Triton asks for its interpreter once, when it is imported."""
    pytest.importorskip("triton")
    checks = Path(__file__).parents[1] / "helpers" / "interpreted_kernels.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(checks)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "10 passed" in done.stdout


def test_kernels_compile_for_nvidia_and_amd():
    """To machine code, on a machine without either; without noise, which is less code, for one."""
    pytest.importorskip("triton")
    script = """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from dlmi.estimators.soft_embedding import kernels

        pointers = {"words": "*i32", "keys": "*i32", "largests": "*i64"}
        numbers = {"positions", "count", "first", "width", "samples"}
        targets = (
            ("cuda", 80, 32, "cubin"), ("cuda", 90, 32, "cubin"), ("hip", "gfx942", 64, "hsaco")
        )
        for backend, arch, warp, binary in targets:
            for name in ("_sums_kernel", "_weights_kernel", "_gradient_kernel"):
                for noise in (True, False) if arch == 80 else (True,):
                    kernel = getattr(kernels, name)
                    constants = {"NOISE": noise}
                    types = {
                        n: "constexpr" if n in constants
                        else "i32" if n in numbers
                        else pointers.get(n, "*fp32")
                        for n in kernel.arg_names
                    }
                    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
                    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp))
                    print(backend, arch, name, len(compiled.asm[binary]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 12
    assert min(sizes) > 1000
