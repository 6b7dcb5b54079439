"""The cost model against the clock: steps and a whole run, predicted and measured."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dlmi.bench.cost_model import CostModel
from dlmi.bench.lm_sizes import Size
from dlmi.bench.scaling import bench_targets, measure_steps
from dlmi.data import TargetDataModule
from dlmi.lm import FrozenLM
from dlmi.methods import DLMI
from dlmi.quiet_run import run_quietly

PREDICTED_SIZES = (
    Size(10, 20, 8),
    Size(80, 20, 8),
    Size(80, 20, 1),
    Size(20, 8, 2),
    Size(20, 8, 2, slots=4),
    Size(20, 8, 1, slots=8),
)
_RUN = Size(20, 8, 2, slots=2)
_RUN_TARGETS, _RUN_STEPS, _RUN_EVAL_EVERY = 4, 20, 5


@dataclass(frozen=True)
class Prediction:
    """Predicted and measured.

    Attributes:
        what: A step, or a whole run.
        size: Its sizes.
        seconds: Measured; the median of the steps.
        predicted_seconds: By the cost model.
        peak_bytes: Measured, of a step, beyond the weights and the slots' tensors.
        predicted_peak_bytes: By the cost model.
    """

    what: str
    size: Size
    seconds: float
    predicted_seconds: float
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None

    def ratios(self) -> dict[str, float]:
        """Predicted over measured."""
        ratios = {"seconds": self.predicted_seconds / self.seconds}
        if self.peak_bytes is not None and self.predicted_peak_bytes is not None:
            ratios["peak"] = self.predicted_peak_bytes / self.peak_bytes
        return ratios


def compare_with_clock(lm: FrozenLM, costs: CostModel, repeats: int) -> Iterator[Prediction]:
    """One size after the other, then a run.

    Args:
        lm: The model.
        costs: Its cost model, on this machine.
        repeats: Timed steps at each size.
    """
    for size in PREDICTED_SIZES:
        clock = measure_steps(lm, size, repeats)
        yield Prediction(
            "step",
            size,
            statistics.median(clock.seconds),
            costs.step_seconds(size),
            clock.peak_bytes,
            costs.lm.step_bytes(size),
        )
    what = f"{_RUN_TARGETS} targets, {_RUN_STEPS} steps"
    predicted = costs.run_seconds(_RUN, _RUN_TARGETS, _RUN_STEPS, _RUN_EVAL_EVERY)
    yield Prediction(what, _RUN, _time_run(lm), predicted)


def _time_run(lm: FrozenLM) -> float:
    """With its evaluations and the LCS matrix of every target."""
    module = DLMI(_RUN.N, _RUN_STEPS, num_samples=_RUN.S, eval_every=_RUN_EVAL_EVERY)
    targets = bench_targets(lm, _RUN_TARGETS, _RUN.M)
    data = TargetDataModule.of(lm, targets, batch_size=_RUN.slots, compile=False)
    start = time.perf_counter()
    run_quietly(module, data)
    return time.perf_counter() - start
