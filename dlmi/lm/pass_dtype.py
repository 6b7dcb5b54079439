"""The dtype that prompts are searched in, where that is not the dtype they are measured in.

On some machines the LM is two to three times as fast in bfloat16, on others several times slower:
so `auto` measures it, once for each machine and LM. A second copy of the LM's weights reads the
prompts of a search; the LM itself measures what is kept.
"""

import contextlib
import copy
import json
import os
import platform
import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from dlmi.jsonl import read_json_file
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.loading import cache_dir
from dlmi.lm.memory import free_memory
from dlmi.lm.placement import kept_bits

PassDType = Literal["auto", "float32", "bfloat16", "float16"]

_FASTER = 0.9  # of the time in the LM's own dtype: a gain that is worth a second copy
_ROOM = 1.5  # times the copy's size must be free
_ROWS, _LENGTH, _KEPT = 8, 32, 8  # of the pass that is timed


def measured_file() -> Path:
    """Where the answers of measurements on this machine are kept."""
    return cache_dir() / "measured.json"


def _remember(key: str, value: Any) -> None:
    """Keep what was measured; a folder that cannot be written is no error."""
    path = measured_file()
    kept = {**(read_json_file(path) or {}), key: value}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        scratch.replace(path)


def pass_copy(lm: FrozenLM, asked: PassDType | None) -> FrozenLM:
    """What reads the prompts of a search: the LM, or a copy of it in the dtype that is asked."""
    return in_dtype(lm, choose_dtype(lm, asked))


def choose_dtype(lm: FrozenLM, asked: PassDType | None) -> torch.dtype:
    """The dtype that prompts are searched in: the one asked for, the fastest, or the LM's own."""
    if asked is None or not _can_copy(lm):
        return lm.dtype
    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    if lm.dtype != torch.float32 or not _fits(lm, torch.bfloat16):
        return lm.dtype
    key = f"pass_dtype {lm.fingerprint()} {_machine(lm.device)}"
    known = (read_json_file(measured_file()) or {}).get(key)
    if not isinstance(known, dict) or known.get("dtype") not in ("float32", "bfloat16"):
        own, other = _seconds(lm), _seconds(in_dtype(lm, torch.bfloat16))
        name = "bfloat16" if other < _FASTER * own else "float32"
        known = {"dtype": name, "seconds": {"float32": own, "bfloat16": other}}
        _remember(key, known)
        rank_zero_info(
            f"The LM's passes run in {name}: one takes {own:.3f} s in float32 and {other:.3f} s in "
            "bfloat16."
        )
    dtype: torch.dtype = getattr(torch, known["dtype"])
    if dtype == lm.dtype:
        lm.copies.clear()
    return dtype


def in_dtype(lm: FrozenLM, dtype: torch.dtype) -> FrozenLM:
    """A copy of an LM whose weights are in another dtype, made once; the LM itself for its own."""
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
    if lm.device.type == "cpu":  # its fused attention is the slower one in 16 bits
        model.set_attn_implementation("eager")
    made = FrozenLM(model, lm.tokenizer, lm.name, lm.revision, lm.bos)
    made.rows_per_pass, made.compile_passes = lm.rows_per_pass, lm.compile_passes
    made.__dict__.update(can_share=lm.can_share, can_pack=lm.can_pack)  # of any dtype
    lm.copies[dtype] = made
    return made


def _can_copy(lm: FrozenLM) -> bool:
    """Whether its weights are numbers of one dtype on one device."""
    return not lm.is_spread and kept_bits(lm.model.config) is None


def _fits(lm: FrozenLM, dtype: torch.dtype) -> bool:
    size = sum(p.numel() for p in lm.model.parameters()) * dtype.itemsize
    free = free_memory(lm.device)
    return free is None or free > _ROOM * size


def _seconds(lm: FrozenLM) -> float:
    """The time of a pass and its gradient, the best of a few."""
    ids = lm.prompt_token_ids[: _ROWS * _LENGTH].to(lm.device)
    embeds = lm.embed(ids)[None].repeat(1, -(-_ROWS * _LENGTH // len(ids)), 1)
    embeds = embeds[:, : _ROWS * _LENGTH].view(_ROWS, _LENGTH, -1)
    times = []
    for _ in range(4):  # the first is for warming up
        start = time.perf_counter()
        given = embeds.detach().clone().requires_grad_()
        [gradient] = torch.autograd.grad(lm.last_logits(given, _KEPT).sum(), given)
        float(gradient.sum())  # waits for the device
        times.append(time.perf_counter() - start)
    return min(times)


def _machine(device: torch.device) -> str:
    """What a measurement holds for: the device, and the number of threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} torch {torch.__version__}"
    name = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        # Virtual machines give many CPUs one name; what they can do tells them apart.
        found = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
        name = found.get("model name", name).strip()
        name += "".join(f" {f}" for f in ("avx512_bf16", "amx_bf16") if f in found.get("flags", ""))
    return f"{device.type} {name} x {torch.get_num_threads()} torch {torch.__version__}"
