"""How many rows go through the LM at once, so that any batch runs on any device.

Rows are independent, so a pass may be cut into passes over fewer rows: the result differs at most
in the last digit, the memory a great deal.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from dlmi.errors import InputError

if TYPE_CHECKING:
    from dlmi.lm import FrozenLM

RowsSetting = int | Literal["auto"]

_SHARE = 0.6  # of the free memory that the rows of a pass may take
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# A pass without a graph keeps a layer or two where one with a graph keeps all.
_WITHOUT_GRAPH = 1 / 8


class RowsPerPass:
    """Cuts passes to what fits.

    Args:
        setting: A number, or `auto`: what fits into the free memory.
    """

    def __init__(self, setting: RowsSetting = "auto") -> None:
        if setting != "auto" and setting < 1:
            raise InputError(
                f"Expected `data.rows_per_pass` to be `auto` or at least 1, but got {setting}."
            )
        self.setting = setting
        self._graph_bytes: float | None = None  # of a token
        self._free: int | None = None
        self._ceiling = 2**62

    def run(
        self,
        lm: "FrozenLM",
        rows: int,
        tokens: int,
        keep: int,
        work: Callable[[slice], None],
        gradient: bool = False,
    ) -> None:
        """Call `work` on slices of the rows, halved when memory runs out.

        Args:
            lm: The model that the work goes through.
            rows: How many rows there are.
            tokens: Tokens of a row.
            keep: Positions of a row with logits.
            work: Does some rows; may be called again for rows that it did not finish.
            gradient: Whether it keeps a graph.
        """
        limit = self._limit(lm, tokens, keep, gradient) if rows > 1 else 1
        passes = -(-rows // limit)
        size, start = -(-rows // passes), 0  # as even as possible: fewer shapes, fuller passes
        while start < rows:
            ran_out = False
            try:
                work(slice(start, min(start + size, rows)))
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                ran_out = True  # handled below, where the error no longer holds on to tensors
            if ran_out:
                size = (size + 1) // 2
                self._ceiling = size
                rank_zero_warn(f"Out of memory: now {size} rows per pass through the LM.")
                _give_back(lm.device)
            else:
                start += size

    def _limit(self, lm: "FrozenLM", tokens: int, keep: int, gradient: bool) -> int:
        if self.setting != "auto":
            return min(self.setting, self._ceiling)
        if self._graph_bytes is None:
            self._graph_bytes = graph_bytes(lm, tokens) / tokens
            self._free = free_memory(lm.device)
        if self._free is None:
            return self._ceiling
        graph = self._graph_bytes * tokens * (1 if gradient else _WITHOUT_GRAPH)
        # Logits, their softmax and the gradient of both, in float32.
        head = 4 * 4 * keep * len(lm.embedding_matrix)
        return max(1, min(int(_SHARE * self._free / (graph + head)), self._ceiling))


def graph_bytes(lm: "FrozenLM", tokens: int) -> int:
    """Memory that the graph of one row takes, from a real one; its weights not counted."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in lm.model.parameters()}
    embeds = torch.zeros(1, tokens, lm.embedding_matrix.shape[1], device=lm.device, dtype=lm.dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
    with torch.enable_grad(), lm.compiled.paused(), hooks:
        lm.last_logits(embeds.requires_grad_(), keep=1)
    return sum(size for pointer, size in saved.items() if pointer not in weights)


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for the next step, where it can be told so (glibc).

    By default it returns large blocks to the system, which hands them out again page by page: on
    the CPU that takes a tenth of a step. A matter of the whole process, so only for programs.
    """
    with contextlib.suppress(AttributeError, OSError):
        tune = ctypes.CDLL(None).mallopt
        tune(_M_MMAP_THRESHOLD, 2**30)
        tune(_M_TRIM_THRESHOLD, 2**31 - 1)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had; None where the device does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    if device.type != "cpu":
        return None
    available: int = psutil.virtual_memory().available
    return min(available, _container_memory())


def _container_memory() -> int:
    """What a container's own limit leaves (control groups, version 2 and 1)."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            return int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
    return 2**62


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in str(error)
        or "not enough memory" in str(error)
    )


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
