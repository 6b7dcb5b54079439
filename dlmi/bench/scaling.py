"""How the time of a step grows with prompt, target, samples, vocabulary and slots."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dlmi.bench.lm_sizes import Size
from dlmi.bench.timing import StepClock
from dlmi.data import TargetDataModule
from dlmi.lm import FrozenLM
from dlmi.methods import DLMI
from dlmi.quiet_run import run_quietly
from dlmi.targets import Target

SIZES = {
    "N": (10, 20, 40, 80),
    "M": (5, 10, 20, 40),
    "S": (1, 2, 4, 8),
    "V": (6144, 12288, 24576, 49152),
    "slots": (1, 2, 4),
}


@dataclass(frozen=True)
class Growth:
    """Time of a step against one size, all others fixed.

    Attributes:
        name: Which size.
        sizes: Its values.
        seconds: Median time of a step at each.
        exponent: b of the least-squares fit seconds = a size^b.
    """

    name: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    exponent: float


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size.

    >>> round(fit_exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    return statistics.linear_regression(x, y).slope


def measure_growth(lm: FrozenLM, repeats: int) -> Iterator[Growth]:
    """One size after the other.

    Args:
        lm: The model.
        repeats: Timed steps at each size.
    """
    for name, wanted in SIZES.items():
        most = len(lm.prompt_token_ids) if name == "V" else max(wanted)
        sizes = tuple(sorted({min(size, most) for size in wanted}))
        seconds = tuple(
            _step_seconds(lm, replace(Size(), **{name: size}), repeats) for size in sizes
        )
        yield Growth(name, sizes, seconds, fit_exponent(sizes, seconds))


def _step_seconds(lm: FrozenLM, size: Size, repeats: int) -> float:
    with _fewer_tokens(lm, size.V):
        return statistics.median(measure_steps(lm, size, repeats).seconds)


def measure_steps(lm: FrozenLM, size: Size, repeats: int) -> StepClock:
    """Time the steps of a real run, and the memory of one of them, over all tokens of the LM."""
    targets = bench_targets(lm, size.slots, size.M)
    module = DLMI(size.N, steps=repeats + 2, num_samples=size.S, eval_every=repeats + 2)
    clock = StepClock(lm.device)
    data = TargetDataModule.of(lm, targets, batch_size=size.slots, compile=False)
    run_quietly(module, data, [clock])
    return clock


def bench_targets(lm: FrozenLM, count: int, length: int) -> list[Target]:
    """Targets that no step is likely to solve."""
    ids = lm.prompt_token_ids[:length].tolist()
    return [Target(f"bench {index}", tuple(ids), "") for index in range(count)]


@contextmanager
def _fewer_tokens(lm: FrozenLM, count: int) -> Iterator[None]:
    """Let prompts hold the first tokens only."""
    before = lm.prompt_token_ids
    if count:
        lm.prompt_token_ids = before[:count]
    try:
        yield
    finally:
        lm.prompt_token_ids = before
