"""Where the time of a search goes, with one slot and with several.

Slots share the LM's passes, so a token-pass takes less time with more slots, until the machine is
busy. Whole runs are timed, evaluations and row building included.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import nn

from dlmi.bench.timing import matmul_flops, seconds_of
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.pass_dtype import PassDType, pass_copy
from dlmi.methods import SwapSearch
from dlmi.run.budget import NO_STEP_LIMIT
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.quiet import run_quietly
from dlmi.targets.target import Target

SEARCHES = ((20, 8, 1), (20, 8, 8), (80, 20, 1), (80, 20, 8))  # N, M, slots
_PRODUCT = (336, 576, 3072)  # a matrix product of the size that a pass of a small LM makes


class _SearchClock(Callback):
    """Times the parts of a search, and counts its steps and their calls of the LM."""

    def __init__(self, models: set[nn.Module]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = self.calls = self.tokens = 0
        self._models = models

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Wrap what is timed: it belongs to this run alone."""
        engine, step = pl_module.engine, pl_module.training_step

        def timed(call: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                results = []
                seconds = seconds_of(lambda: results.append(call(*given)), engine.lm.device)
                self.seconds[name_of(*given)] += seconds
                return results[0]

            return run

        def kind(plan: Any) -> str:
            return "gradient" if plan.passes[0].has_gradient else "candidates"

        def counted_step(*batch: Any) -> Any:
            self.steps += 1
            hooks = [
                model.register_forward_pre_hook(self._count, with_kwargs=True)
                for model in self._models
            ]
            result = step(*batch)
            for hook in hooks:
                hook.remove()
            return result

        engine._read = timed(engine._read, kind)
        pl_module.evaluate = timed(pl_module.evaluate, lambda slots: "evaluation")
        pl_module.training_step = counted_step
        self._start = time.perf_counter()

    def _count(self, model: Any, inputs: Any, named: dict[str, Any]) -> None:
        self.calls += 1
        self.tokens += named["inputs_embeds"].shape[:2].numel()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Take the time of the whole run."""
        self.seconds["all"] = time.perf_counter() - self._start


def time_search(
    lm: FrozenLM,
    targets_ids: Sequence[Sequence[int]],
    length: int,
    token_budget: int,
    pass_dtype: PassDType | None = None,
) -> dict[str, str | float]:
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
    speed = sum(row.forward_tokens + row.backward_tokens for row in search.finished) / seconds
    return {
        "prompt_length": length,
        "target_length": len(targets[0].ids),
        "slots": len(targets),
        "pass_dtype": reader.dtype_name,  # prompts that are kept are measured in the LM's own
        "seconds_per_step": seconds / clock.steps,  # of all slots
        "token_passes_per_second": speed,
        "evaluation": clock.seconds["evaluation"] / seconds,  # share of the time
        "gradient": clock.seconds["gradient"] / seconds,
        "candidates": clock.seconds["candidates"] / seconds,
        "calls_per_step": clock.calls / clock.steps,  # without starts and evaluations
        "tokens_per_call": clock.tokens / clock.calls,
        "matmul_share": speed * operations / matmul_flops(lm.device, reader.dtype, _PRODUCT),
    }
