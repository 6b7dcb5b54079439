"""Workers side by side: each inverts targets of one shared queue on its own device.

Plain DDP would make the prompts of all workers equal, because it broadcasts worker 0's parameters
and averages gradients. Here there is no process group, which would synchronise every step: workers
share a key-value store, torchrun's own or one that worker 0 opens, and wait for each other only
before the first step.
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
    """Split the targets over all devices, of one machine or of many; no gradient is shared.

    A worker that is free takes the next target of a queue that all share. Noise depends on seed and
    target alone, so the results are the same for any number of workers. It is the default where
    `trainer.devices` x `trainer.num_nodes` is more than 1.
    """

    strategy_name = "target_parallel"

    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers()
        self._is_apart = False

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._processes = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = self._processes

    def setup_distributed(self) -> None:
        """Connect to the store of the run: torchrun's, or worker 0's."""
        reset_seed()
        self.set_world_ranks()
        if self.world_size == 1:
            return
        environment = self.cluster_environment
        assert environment is not None
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
                f"worker {self.global_rank} could not reach worker 0 at {place} "
                f"({first_line(error)})."
            ) from error
        self.workers = Workers(store, self.global_rank, self.world_size, self._processes.ended)
        self.workers.barrier()

    def configure_ddp(self) -> None:
        """Do not wrap the module: no gradient is shared."""

    def on_train_start(self) -> None:
        """The last barrier: from here on no worker waits for another."""
        self.barrier()
        self._is_apart = True

    def on_train_end(self) -> None:
        """Wait for the workers that this one has started."""
        for process in self._processes.procs:
            process.wait()

    def on_exception(self, exception: BaseException) -> None:
        """Ask the workers that this one has started to save and end, too."""
        self._processes.kill(signal.SIGTERM)

    # ---- what Lightning calls to synchronise workers

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the others; after the first step, do not."""
        if not self._is_apart:
            self.workers.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Worker 0's value, before the first step; afterwards each worker's own."""
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
    description="Targets split over workers by a shared queue, without gradient sync",
)


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, except that a worker that dies does not kill the others."""

    def launch(
        self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the workers of this machine, unless torchrun, SLURM or the like did."""
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            # torch would print C++ frames when the store of a worker 0 that has ended is used.
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
    return strategy.workers if isinstance(strategy, TargetParallelStrategy) else Workers()
