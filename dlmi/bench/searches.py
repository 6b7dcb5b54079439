"""Where the time of a search goes, with one slot and with several.

Slots share the LM's passes, so a token-pass takes less time with more slots, until the machine is
busy. Whole runs are timed, evaluations and row building included.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import nn

from dlmi.bench.timing import matmul_flops, synchronize
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.pass_dtype import PassDType, pass_copy
from dlmi.methods import SwapSearch
from dlmi.run.budget import NO_STEP_LIMIT
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.quiet import run_quietly
from dlmi.targets.target import Target

SEARCHES = ((20, 8, 1), (20, 8, 8), (80, 20, 1), (80, 20, 8))  # N, M, slots
_PARTS = ("evaluation", "gradient", "candidates")
_PRODUCT = (336, 576, 3072)  # a matrix product of the size that a pass of a small LM makes


@dataclass(frozen=True)
class SearchTimes:
    """One line of the table."""

    prompt_length: int
    target_length: int
    slots: int
    pass_dtype: str  # of the passes; prompts that are kept are measured in the LM's own
    seconds_per_step: float  # of all slots
    token_passes_per_second: float
    evaluation: float  # share of the time that is spent on decoding
    gradient: float  # on passes for swaps
    candidates: float  # on passes for scores
    calls_per_step: float  # of the LM, without starts and evaluations
    tokens_per_call: float
    matmul_share: float  # of the speed of a matrix product in the dtype of the passes


@dataclass
class _SearchClock(Callback):
    """Times the parts of a search, and counts the calls of the LM that reads its passes."""

    models: set[nn.Module]
    seconds: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    tokens: int = 0
    steps: int = 0
    token_passes: int = 0
    _start: float = 0.0
    _is_stepping: bool = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Wrap what is timed: it belongs to this run alone."""
        engine = pl_module.engine
        device = engine.lm.device

        def timed(call: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                name = name_of(*given)
                self._is_stepping |= name == "steps"
                synchronize(device)
                start = time.perf_counter()
                result = call(*given)
                synchronize(device)
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
                self._is_stepping &= name != "steps"
                return result

            return run

        def kind(plan: Any) -> str:
            return "gradient" if plan.passes[0].has_gradient else "candidates"

        pl_module.training_step = timed(pl_module.training_step, lambda *batch: "steps")
        engine._read = timed(engine._read, kind)
        pl_module.evaluate = timed(pl_module.evaluate, lambda slots: "evaluation")
        self._hooks = [
            model.register_forward_pre_hook(self._count, with_kwargs=True) for model in self.models
        ]
        self._start = time.perf_counter()

    def _count(self, model: Any, inputs: Any, named: dict[str, Any]) -> None:
        if self._is_stepping:
            self.calls += 1
            self.tokens += named["inputs_embeds"].shape[:2].numel()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Count the steps."""
        self.steps += 1

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Sum up, and leave the LM as it was."""
        self.seconds["all"] = time.perf_counter() - self._start
        for hook in self._hooks:
            hook.remove()
        slots = pl_module.active
        rows = pl_module.finished
        self.token_passes = sum(slot.cost.total for slot in slots)
        self.token_passes += sum(row.forward_tokens + row.backward_tokens for row in rows)


def time_search(
    lm: FrozenLM,
    targets_ids: Sequence[Sequence[int]],
    length: int,
    token_budget: int,
    pass_dtype: PassDType | None = None,
) -> SearchTimes:
    """Time a search for prompts of N tokens, with a target in each slot and a budget for each."""
    targets = [Target.single(f"bench {i}", tuple(ids), "") for i, ids in enumerate(targets_ids)]
    reader = pass_copy(lm, pass_dtype)
    clock = _SearchClock({lm.model, reader.model})
    search = Inverter(
        SwapSearch(), length, NO_STEP_LIMIT, token_budget=token_budget, pass_dtype=pass_dtype
    )
    run_quietly(search, TargetDataModule.of(lm, targets, batch_size=len(targets)), [clock])
    operations = 2 * sum(parameter.numel() for parameter in lm.model.parameters())  # of a token
    seconds = clock.seconds["all"]
    speed = clock.token_passes / seconds
    shares = {name: clock.seconds.get(name, 0.0) / seconds for name in _PARTS}
    return SearchTimes(
        prompt_length=length,
        target_length=len(targets[0].ids),
        slots=len(targets),
        pass_dtype=reader.dtype_name,
        seconds_per_step=seconds / clock.steps,
        token_passes_per_second=speed,
        **shares,
        calls_per_step=clock.calls / clock.steps,
        tokens_per_call=clock.tokens / clock.calls,
        matmul_share=speed * operations / matmul_flops(lm.device, reader.dtype, _PRODUCT),
    )
