"""Wall time and peak memory for the benchmark."""

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dlmi.lm.products import plain_products, use_packed_products

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


class PeakMemory:
    """The peak of allocated memory until `stop`, above what is allocated now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: profile | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.start()

    def stop(self) -> int:
        """Bytes."""
        if self._profiler is None:
            return torch.cuda.max_memory_allocated(self._device) - self._before
        self._profiler.stop()
        events: Any = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        events = sorted(events, key=lambda event: int(event.start_ns()))
        changes = (event.nbytes() for event in events if event.name() == "[memory]")
        return max(itertools.accumulate(changes), default=0)


def peak_of(work: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of one call, bytes."""
    memory = PeakMemory(device)
    work()
    return memory.stop()


def matmul_flops(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int] = (2048, 2048, 2048)
) -> float:
    """Floating-point operations per second of a matrix product, (a, b) by (b, c).

    The median of nine products, plain or with a packed matrix, whichever is faster here.
    """
    a, b, c = shape
    inputs = torch.rand(a, b, device=device).to(dtype)
    layer = nn.Linear(b, c, bias=False, device=device, dtype=dtype).requires_grad_(False)
    use_packed_products(layer)

    def median_seconds() -> float:
        times = [seconds_of(lambda: layer(inputs), device) for _ in range(10)]
        return statistics.median(times[1:])

    with plain_products():
        plain = median_seconds()
    return 2 * a * b * c / min(plain, median_seconds())


class StepClock(Callback):
    """Times the steps of a run on `device`, after the first `warm_up`; calls `between` after each.

    Memory is measured in the last step of the warm-up.
    """

    def __init__(
        self, device: torch.device, warm_up: int, between: Callable[[], None] = lambda: None
    ) -> None:
        self.seconds: list[float] = []
        self.token_passes = 0  # of all slots, in the timed steps
        self.peak_bytes = 0
        self._device = device
        self._warm_up = warm_up
        self._between = between
        self._memory: PeakMemory | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """A step begins."""
        self._warm_up -= 1
        if self._warm_up == 0:
            self._memory = PeakMemory(self._device)
        self._spent = sum(slot.cost.total for slot in pl_module.active)
        synchronize(self._device)
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """A step is over, parameters updated."""
        synchronize(self._device)
        seconds = time.perf_counter() - self._start
        if self._memory is not None:
            self.peak_bytes, self._memory = self._memory.stop(), None
        elif self._warm_up < 0:
            self.seconds.append(seconds)
            self.token_passes += sum(slot.cost.total for slot in pl_module.active) - self._spent
            self._between()
