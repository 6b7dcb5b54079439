"""Clocks and peaks for the benchmark."""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.profiler import ProfilerActivity, profile


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told."""
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
    """The most memory allocated at once between start and stop, beyond what was there before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self._silence = contextlib.ExitStack()
        self._profiler: profile | None = None

    def start(self) -> None:
        """From now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._silence.enter_context(_silent_stderr())
            self._profiler.start()

    def stop(self) -> int:
        """Bytes."""
        if self._profiler is None:
            return torch.cuda.max_memory_allocated(self._device) - self._before
        self._profiler.stop()
        self._silence.close()
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        held = peak = 0
        for event in sorted(events, key=lambda event: int(event.start_ns())):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep the profiler's own notes, which are written below Python, off the screen."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_of(work: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of one call, bytes."""
    peak = PeakMemory(device)
    peak.start()
    work()
    return peak.stop()


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 2048) -> float:
    """Floating-point operations per second of a square matrix product, the median of five."""
    left, right = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = [seconds_of(lambda: torch.mm(left, right, out=out), device) for _ in range(6)]
    return 2 * size**3 / statistics.median(times[1:])


class StepClock(Callback):
    """Times the optimisation steps of a run, and lets others run between two steps.

    Args:
        device: Where the steps run.
        between: Called after each timed step.
        warm_up: Steps that are not timed; the memory is measured in the last of them.
    """

    def __init__(
        self,
        device: torch.device,
        between: Callable[[], None] | None = None,
        warm_up: int = 2,
    ) -> None:
        self.seconds: list[float] = []
        self.peak_bytes = 0
        self._device = device
        self._between = between
        self._warm_up = warm_up
        self._memory = PeakMemory(device)
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self._warm_up -= 1
        if self._warm_up == 0:
            self._memory.start()
        synchronize(self._device)
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """A step is over, parameters updated."""
        synchronize(self._device)
        seconds = time.perf_counter() - self._start
        if self._warm_up == 0:
            self.peak_bytes = self._memory.stop()
        elif self._warm_up < 0:
            self.seconds.append(seconds)
            if self._between is not None:
                self._between()
