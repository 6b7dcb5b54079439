"""The LM's pass over one fixed shape, compiled; every other shape runs as it is.

Only the LM is compiled, never the step around it, and only for the shape that nearly all passes of
a run have: a changing number of rows would compile again and again.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

CompileSetting = bool | Literal["auto"]
Shape = tuple[int, int, int]  # rows, tokens, positions with logits

# Measured on two cores with 30 layers: 112 s to compile, then 2 to 12% faster.
_SECONDS_PER_LAYER = 4.0
_SAVED_SHARE = 0.08


class CompileDecision:
    """Whether to compile, decided once, after the time of a step is known.

    Args:
        setting: `auto` compiles where that wins back at least twice what it costs, as far as the
            first steps can tell.
    """

    def __init__(self, setting: CompileSetting) -> None:
        self._setting = setting
        self._seconds: list[float] = []
        self._start = 0.0
        self._is_open = setting is not False

    def start_step(self) -> None:
        """A step begins."""
        self._start = time.perf_counter()

    def end_step(self) -> None:
        """A step ends."""
        if self._is_open:
            self._seconds.append(time.perf_counter() - self._start)

    def is_made(self, steps_left: float, layers: int) -> bool:
        """True once, at the moment when compiling is decided upon.

        Args:
            steps_left: Steps that would be faster.
            layers: Blocks of the LM.
        """
        if not self._is_open or len(self._seconds) < (1 if self._setting is True else 4):
            return False
        self._is_open = False
        saved = statistics.median(self._seconds) * steps_left * _SAVED_SHARE
        return self._setting is True or saved > 2 * layers * _SECONDS_PER_LAYER


class CompiledPass:
    """Runs a pass compiled where the shape is the chosen one.

    Args:
        run: The pass: embeddings (R, T, d) and the number of last positions to logits (R, keep, V).
    """

    def __init__(self, run: Callable[[Tensor, int], Tensor]) -> None:
        self._run = run
        self._is_paused = False
        self._compiled: Any = None
        self._chosen: Shape | None = None
        self._latest: Shape | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run as it is, for passes that are not like the others."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def choose_latest(self) -> None:
        """From now on, compile passes of the shape that was last seen."""
        if self._latest is None:
            return
        rows, tokens, _ = self._latest
        print(
            f"compiling the LM for {rows} x {tokens} tokens: this takes minutes, later steps are "
            "faster (`--data.compile false` leaves it out)",
            file=sys.stderr,
        )
        self._chosen = self._latest

    def __call__(self, inputs_embeds: Tensor, keep: int) -> Tensor:
        """The logits of the last positions, (R, keep, V)."""
        if self._is_paused:
            return self._run(inputs_embeds, keep)
        self._latest = (inputs_embeds.shape[0], inputs_embeds.shape[1], keep)
        if self._latest != self._chosen:
            return self._run(inputs_embeds, keep)
        try:
            if self._compiled is None:
                self._compiled = torch.compile(self._run, dynamic=False)
            logits: Tensor = self._compiled(inputs_embeds, keep)
        except Exception as error:  # a missing C++ compiler, a layer that it does not know, ...
            rank_zero_warn(
                "The LM could not be compiled and runs as it is: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            )
            self._chosen = None
            return self._run(inputs_embeds, keep)
        return logits
