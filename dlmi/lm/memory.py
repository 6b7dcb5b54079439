"""How many rows go through the LM at once, so that any batch runs on any device.

Rows are independent, so a pass may be cut into passes over fewer rows. The results differ at most
in the last digit.
"""

import contextlib
import ctypes
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from dlmi.errors import check_at_least_one

RowsSetting = int | Literal["auto"]

_SHARE = 0.6  # of the free memory that the rows of a pass may take
_WITHOUT_GRAPH = 1 / 8  # memory of a pass without a graph, which keeps a layer or two, not all
_PACKED_TOKENS = 640  # of a packed pass on the CPU: more is no faster and takes more memory
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class RowsPerPass:
    """Splits passes over many rows of one LM: to a given size, or to what fits into memory."""

    def __init__(self, setting: RowsSetting = "auto") -> None:
        if setting != "auto":
            check_at_least_one("data", rows_per_pass=setting)
        self.setting = setting
        self._ceiling = 2**62
        # Of each device: the memory of a token's graph and the free memory, in bytes
        self._room: list[tuple[float, int]] | None = None

    def slices(
        self,
        lm: Any,
        rows: int,
        tokens: int,
        keep: int,
        gradient: bool = False,
        is_packed: bool = False,
    ) -> list[slice]:
        """Which rows go through a `FrozenLM` at once, if memory does not run out.

        `tokens` and `keep` are the tokens of a row and its positions with logits, on average if
        rows of different lengths are packed. Passes with a `gradient` keep a graph.
        """
        limit = self._limit(lm, tokens, keep, gradient) if rows > 1 else 1
        if is_packed and self.setting == "auto" and lm.device.type == "cpu":
            limit = min(limit, max(1, _PACKED_TOKENS // tokens))
        size = math.ceil(rows / math.ceil(rows / limit))  # even: fewer shapes, fuller passes
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]

    def run(
        self,
        lm: Any,
        rows: int,
        tokens: int,
        keep: int,
        work: Callable[[slice], None],
        gradient: bool = False,
        is_packed: bool = False,
    ) -> None:
        """Call `work` on `slices` of the rows, halved when memory runs out.

        It is called again for rows that it did not finish.
        """
        size, start = self.slices(lm, rows, tokens, keep, gradient, is_packed)[0].stop, 0
        while start < rows:
            try:
                work(slice(start, min(start + size, rows)))
                start += size
                continue
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # Outside the handler, where the error no longer holds on to tensors.
            self._ceiling = size = (size + 1) // 2
            rank_zero_warn(f"Out of memory: now {size} rows per pass through the LM.")
            gc.collect()
            torch.cuda.empty_cache()  # of every device

    def _limit(self, lm: Any, tokens: int, keep: int, gradient: bool) -> int:
        if self.setting != "auto":
            return min(self.setting, self._ceiling)
        if self._room is None:
            graphs = graph_bytes(lm, tokens)
            room = [(size / tokens, free_memory(device)) for device, size in graphs.items()]
            self._room = [(graph, free) for graph, free in room if free is not None]
        # Logits, their softmax and the gradients of both, in float32, on any of the devices.
        head = 4 * 4 * keep * len(lm.embedding_matrix)
        limit = self._ceiling
        for graph, free in self._room:
            row = graph * tokens * (1 if gradient else _WITHOUT_GRAPH) + head
            limit = min(limit, int(_SHARE * free / row))
        return max(1, limit)


def graph_bytes(lm: Any, tokens: int) -> dict[torch.device, int]:
    """Memory of the graph of one row on each device, without the weights that stay there."""
    saved: dict[int, tuple[torch.device, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (tensor.device, storage.nbytes())
        return tensor

    parameters = list(lm.model.parameters())
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    embeds = torch.zeros(1, tokens, lm.embedding_matrix.shape[1], device=lm.device, dtype=lm.dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
    with torch.enable_grad(), hooks, lm.not_compiled():
        lm.last_logits(embeds.requires_grad_(), keep=1)
    # Offloaded layers are computed on one of the devices that hold weights.
    total = {p.device: 0 for p in parameters if p.device.type != "meta"}
    for pointer, (device, size) in saved.items():
        total[device] = total.get(device, 0) + (size if pointer not in weights else 0)
    return total


def keep_freed_memory() -> None:
    """Let glibc keep freed memory of the process for the next step.

    By default it returns large blocks to the system, which on the CPU costs a tenth of a step.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        tune = ctypes.CDLL(None).mallopt
        tune(_M_MMAP_THRESHOLD, 2**30)
        tune(_M_TRIM_THRESHOLD, 2**31 - 1)


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device; None where it does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    if device.type != "cpu":
        return None
    available: int = psutil.virtual_memory().available
    root = Path("/sys/fs/cgroup")  # a container's own limit, in control groups of version 2 or 1
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            left = int((root / limit).read_text()) - int((root / used).read_text())
            return min(available, left)
    return available


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    of_cpu = ("can't allocate memory", "not enough memory")
    # Of the driver, and of libraries that allocate on their own
    of_gpu = ("CUDA error: out of memory", "HIP error: out of memory", "_STATUS_ALLOC_FAILED")
    return any(message in str(error) for message in of_cpu + of_gpu)
