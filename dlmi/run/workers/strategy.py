"""Workers side by side: each inverts targets of one shared queue on its own device.

Plain DDP would make the workers' prompts equal, because it broadcasts worker 0's parameters and
averages gradients. Here nothing is averaged. There is not even a process group, in which Lightning
would let the workers step in time: they meet at a key-value store, the one that `torchrun` keeps or
one that worker 0 opens, and wait for each other only before the first step.
"""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dlmi.errors import RunStopped, first_line
from dlmi.run.workers.workers import MEET_WITHIN, Workers

T = TypeVar("T")


class TargetParallelStrategy(DDPStrategy):
    """Split the targets over all devices, of one machine or of many; no gradient crosses.

    A worker that is free takes the next target of a queue that all share. Noise depends on seed and
    target alone, so the results are the same for any number of workers. Chosen by itself where
    `trainer.devices` x `trainer.num_nodes` is more than 1.
    """

    strategy_name = "target_parallel"

    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers.alone()
        self._is_apart = False

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Meet the others at the store: torchrun's, or worker 0's."""
        reset_seed()
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        assert isinstance(self._launcher, _Launcher)
        if self.world_size == 1:
            return
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                environment.main_address,
                environment.main_port,
                is_master=self.global_rank == 0 and not has_agent,
                wait_for_workers=False,
                timeout=timedelta(seconds=MEET_WITHIN),
            )
        except RuntimeError as error:
            place = f"{environment.main_address}:{environment.main_port}"
            raise RunStopped(
                f"worker {self.global_rank} could not meet the others at {place} "
                f"({first_line(error)})."
            ) from error
        self.workers = Workers(store, self.global_rank, self.world_size, self._launcher.ended)
        self.workers.barrier()

    def configure_ddp(self) -> None:
        """Nothing: the module stays as it is, on every worker its own."""

    def on_train_start(self) -> None:
        """The last barrier: from here on every worker goes at its own pace."""
        self.barrier()
        self._is_apart = True

    def on_train_end(self) -> None:
        """Worker 0 stays until the workers that it has started are done."""
        assert isinstance(self._launcher, _Launcher)
        for process in self._launcher.procs:
            process.wait()

    def on_exception(self, exception: BaseException) -> None:
        """Ask the workers that this one has started to save and end, too."""
        assert isinstance(self._launcher, _Launcher)
        self._launcher.kill(signal.SIGTERM)

    # ---- what Lightning calls to keep workers in step

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the others, before the first step."""
        if not self._is_apart:
            self.workers.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """What worker 0 has, before the first step; afterwards each worker's own."""
        if self._is_apart:
            return obj
        value: T = self.workers.broadcast(str(obj) if isinstance(obj, Path) else obj)
        return value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Each worker decides for itself."""
        return decision

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Every worker saves its own targets, to a file of its own."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


StrategyRegistry.register(
    TargetParallelStrategy.__name__.lower(),  # Lightning lowers the name that a user gives
    TargetParallelStrategy,
    description="Targets split over workers by a shared queue, with no gradient sync",
)


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, but a worker that dies does not kill the others."""

    def launch(
        self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the workers of this machine, unless torchrun, SLURM or the like did."""
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            # Of a store that is gone torch would print a stack of C++ frames.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            self._call_children_scripts()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)

    def ended(self) -> str | None:
        """Which worker of this machine has ended with an error, and how."""
        first = self.cluster_environment.node_rank() * self.num_processes
        for local_index, process in enumerate(self.procs, start=1):
            if code := process.poll():
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                size = self.num_processes * self.num_nodes
                return f"worker {first + local_index} of {size} has ended ({how})"
        return None


def workers_of(strategy: Strategy) -> Workers:
    """The workers of a run, or this process alone."""
    return strategy.workers if isinstance(strategy, TargetParallelStrategy) else Workers.alone()
