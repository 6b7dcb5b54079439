"""The dtype that prompts are searched in, where it differs from the dtype of measurements.

On some machines the LM is two to three times as fast in bfloat16, on others several times slower.
So `auto` measures it, once for each machine and LM. A second copy of the LM's weights reads the
prompts of a search; the LM itself measures what is kept.
"""

import copy
import time
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.machine import cpu_facts
from dlmi.lm.measured import announce, read_measured, write_measured
from dlmi.lm.memory import free_memory
from dlmi.lm.placement import quantized_bits

PassDType = Literal["auto", "float32", "bfloat16", "float16"]

_FASTER = 0.9  # of the time in the LM's own dtype: a gain that is worth a second copy
_ROOM = 1.5  # times the copy's size must be free
_ROWS, _LENGTH, _KEPT = 8, 32, 8  # of the pass that is timed


def pass_copy(lm: FrozenLM, asked: PassDType | None) -> FrozenLM:
    """The LM that reads the prompts of a search: `lm`, or a copy of it in another dtype."""
    return in_dtype(lm, choose_dtype(lm, asked))


def choose_dtype(lm: FrozenLM, asked: PassDType | None) -> torch.dtype:
    """The dtype of a search: the one asked for, the fastest, or the LM's own."""
    has_one_dtype = not lm.is_spread and quantized_bits(lm.model.config) is None
    if asked is None or not has_one_dtype:
        return lm.dtype
    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    if lm.dtype != torch.float32 or not _fits(lm, torch.bfloat16):
        return lm.dtype
    key = f"pass_dtype {lm.fingerprint()} {_machine(lm.device)}"
    known = read_measured(key, "dtype", ("float32", "bfloat16"))
    if known is None:
        own, other = _seconds(lm), _seconds(in_dtype(lm, torch.bfloat16))
        name = "bfloat16" if other < _FASTER * own else "float32"
        known = {"dtype": name, "seconds": {"float32": own, "bfloat16": other}}
        write_measured(key, known)
        announce(
            f"The LM's passes run in {name}: one takes {own:.3f} s in float32 and {other:.3f} s in "
            "bfloat16."
        )
    dtype: torch.dtype = getattr(torch, known["dtype"])
    if dtype == lm.dtype:
        lm.copies.clear()
    return dtype


def in_dtype(lm: FrozenLM, dtype: torch.dtype) -> FrozenLM:
    """A copy of an LM with weights in another dtype, made once; the LM itself for its own."""
    if dtype == lm.dtype or dtype in lm.copies:
        return lm.copies.get(dtype, lm)
    if not _fits(lm, dtype):
        rank_zero_warn(
            f"There is no room for a copy of the LM in {dtype}: its passes stay in {lm.dtype}."
        )
        return lm
    model = copy.deepcopy(lm.model)
    for parameter in model.parameters():  # not the buffers: positions need float32
        parameter.data = parameter.data.to(dtype)
    if lm.device.type == "cpu":  # where fused attention is slower in 16 bits
        model.set_attn_implementation("eager")
    made = FrozenLM(model, lm.tokenizer, lm.name, lm.revision, lm.bos)
    made.rows_per_pass, made.compile_passes = lm.rows_per_pass, lm.compile_passes
    made.__dict__.update(can_share=lm.can_share, can_pack=lm.can_pack)  # the same in any dtype
    lm.copies[dtype] = made
    return made


def _fits(lm: FrozenLM, dtype: torch.dtype) -> bool:
    size = sum(p.numel() for p in lm.model.parameters()) * dtype.itemsize
    free = free_memory(lm.device)
    return free is None or free > _ROOM * size


def _seconds(lm: FrozenLM) -> float:
    """The time of a pass and its gradient, the best of a few."""
    ids = lm.prompt_token_ids[torch.arange(_ROWS * _LENGTH) % len(lm.prompt_token_ids)]
    embeds = lm.embed(ids.view(_ROWS, _LENGTH).to(lm.device))
    times = []
    for _ in range(4):  # the first is a warm-up
        start = time.perf_counter()
        given = embeds.detach().clone().requires_grad_()
        [gradient] = torch.autograd.grad(lm.last_logits(given, _KEPT).sum(), given)
        float(gradient.sum())  # waits for the device
        times.append(time.perf_counter() - start)
    return min(times)


def _machine(device: torch.device) -> str:
    """The device, number of threads and version that a measurement is valid for."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} torch {torch.__version__}"
    facts = cpu_facts()
    # Virtual machines give many CPUs one name; their flags tell them apart.
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts["flags"].split()]
    name = " ".join([facts["model name"], *flags])
    return f"{device.type} {name} x {torch.get_num_threads()} torch {torch.__version__}"
