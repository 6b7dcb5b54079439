"""How fast this machine is, from its parts: products, elementwise work, noise, small layers.

The LM that is predicted is not run; only random matrices of its shapes are multiplied. What a layer
and a step cost beyond their arithmetic is measured on a toy: a Llama of width 16, one token, one
sample.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from dlmi.bench.cost_model import Machine
from dlmi.bench.lm_sizes import Size, Sizes
from dlmi.bench.scaling import measure_steps
from dlmi.bench.timing import matmul_flops, seconds_of
from dlmi.lm import FrozenLM
from dlmi.soft_embedding import soft_embedding

_REPEATS = 9
_ROWS = (16, 512)  # products are measured at, a line is drawn through
_MATRIX_BYTES = 200e6  # more than the caches hold, as an LM's weights are
_ATTENTION = (8, 100)  # rows, tokens
_CHAIN = 16
_ACTIVATIONS = (512, 2048)
_LAYERS = (1, 9)
_SLOTS = (1, 5)


def calibrate(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure a machine, in some ten seconds, with products of an LM's shapes."""
    flops, weight_bandwidth = _product_speed(sizes, device, dtype)
    shallow, deep = (toy_lm(layers, device) for layers in _LAYERS)
    forward, both = (
        (_pass_seconds(deep, backward) - _pass_seconds(shallow, backward))
        / (_LAYERS[1] - _LAYERS[0])
        for backward in (False, True)
    )
    one, many = (_toy_step_seconds(shallow, slots) for slots in _SLOTS)
    slot_seconds = max(0.0, (many - one) / (_SLOTS[1] - _SLOTS[0]))
    return Machine(
        flops=flops,
        flops_float32=flops if dtype == torch.float32 else matmul_flops(device, torch.float32),
        attention_flops=_attention_speed(sizes, device, dtype),
        weight_bandwidth=weight_bandwidth,
        bandwidth=_elementwise_bandwidth(device, dtype),
        entry_seconds=_entry_seconds(device),
        layer_seconds=(forward, both - forward),
        step_seconds=max(0.0, one - slot_seconds - both * _LAYERS[0]),
        slot_seconds=slot_seconds,
    )


def toy_lm(layers: int, device: torch.device) -> FrozenLM:
    """A random Llama of width 16 and 32 tokens."""
    vocabulary = {"<eos>": 0, **{f"w{i}": i for i in range(1, 32)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return FrozenLM(model.to(device), tokenizer, "toy")


def _product_speed(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Operations per second, and bytes of weights per second, over the shapes of a block.

    Seconds are linear in the rows: the slope is the one, the intercept the other.
    """
    shapes = [
        *[(sizes.query_width, sizes.width), (sizes.width, sizes.query_width)],
        *[(sizes.key_width, sizes.width)] * 2,
        *[(sizes.mlp_width, sizes.width)] * 2,
        (sizes.width, sizes.mlp_width),
    ]
    weights = sum(a * b for a, b in shapes)
    blocks = int(min(sizes.layers, max(1, _MATRIX_BYTES / (weights * dtype.itemsize))))
    matrices = [torch.rand(s, device=device, dtype=dtype) for s in shapes * blocks]
    seconds = []
    for rows in _ROWS:
        inputs = {
            s: torch.rand(rows, s, device=device, dtype=dtype) for pair in shapes for s in pair
        }

        def products(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for matrix in matrices:
                torch.mm(inputs[matrix.shape[1]], matrix.T)  # forward
                torch.mm(inputs[matrix.shape[0]], matrix)  # backward

        seconds.append(_median_seconds(products, device) / (2 * blocks))
    per_row = (seconds[1] - seconds[0]) / (_ROWS[1] - _ROWS[0])
    reading = max(seconds[0] - _ROWS[0] * per_row, 0.01 * seconds[0])
    return 2 * weights / per_row, weights * dtype.itemsize / reading


def _attention_speed(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of causal attention, forward and backward."""
    rows, tokens = _ATTENTION
    head_width = sizes.query_width // sizes.heads
    queries, keys, values = (
        torch.rand(rows, heads, tokens, head_width, device=device, dtype=dtype).requires_grad_()
        for heads in (sizes.heads, *[sizes.key_width // head_width] * 2)
    )

    def both_ways() -> None:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out.sum(), [queries, keys, values])

    operations = 3.5 * sizes.attention_operations(rows, tokens) / sizes.layers
    return operations / _median_seconds(both_ways, device)


def _elementwise_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Of a chain with a graph, forward and backward: what is kept is written to fresh memory."""
    start, other = (torch.rand(_ACTIVATIONS, device=device, dtype=dtype) for _ in range(2))
    start.requires_grad_()

    def chain() -> None:
        x = start
        for _ in range(_CHAIN):
            x = F.silu(x) * other + x
        torch.autograd.grad(x, start, start)

    accesses = (2 + 3 + 3) + (3 + 3 + 3)  # silu, product, sum; product, silu, sum of both paths
    return accesses * _CHAIN * start.nbytes / _median_seconds(chain, device)


def _entry_seconds(device: torch.device) -> tuple[float, float]:
    """Noise and softmax alone: with an embedding of width 1 the products are nothing."""
    samples, positions, columns = 8, 16, 2**15
    logits = torch.randn(positions, columns, device=device, requires_grad=True)
    tau = torch.ones(1, positions, device=device, requires_grad=True)
    matrix = torch.rand(columns, 1, device=device)

    def forward() -> torch.Tensor:
        return soft_embedding([logits], tau, matrix, [0], samples).sum()

    entries = samples * positions * columns
    one_way = _median_seconds(forward, device) / entries
    both = _median_seconds(lambda: torch.autograd.grad(forward(), [logits, tau]), device) / entries
    return one_way, both - one_way


def _pass_seconds(lm: FrozenLM, backward: bool) -> float:
    embeds = lm.embed(torch.zeros(1, 1, dtype=torch.int64, device=lm.device)).requires_grad_()

    def one_pass() -> None:
        with torch.set_grad_enabled(backward):
            logits = lm.last_logits(embeds, keep=1)
        if backward:
            torch.autograd.grad(logits.sum(), embeds)

    return _median_seconds(one_pass, lm.device)


def _toy_step_seconds(lm: FrozenLM, slots: int) -> float:
    clock = measure_steps(lm, Size(1, 1, 1, slots=slots), repeats=20)
    return statistics.median(clock.seconds)


def _median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    times = [seconds_of(work, device) for _ in range(_REPEATS + 2)]
    return statistics.median(times[2:])
