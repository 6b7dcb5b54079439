"""Workers side by side: each inverts targets of one shared queue on its own device.

Plain DDP would make the workers' prompts equal, because it broadcasts worker 0's parameters and
averages gradients. Here nothing is averaged. There is not even a process group, in which Lightning
would let the workers step in time: they meet at a key-value store, the one that `torchrun` keeps or
one that worker 0 opens, and wait for each other only before the first step.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments import (  # type: ignore[attr-defined]
    ClusterEnvironment,
    LightningEnvironment,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from dlmi.errors import RunStopped
from dlmi.run.workers.workers import Ranks

T = TypeVar("T")

_MEET_WITHIN = 1800.0  # seconds: loading a large LM from a slow disk takes its time
_KNOCK = timedelta(seconds=10)


class TargetParallelStrategy(DDPStrategy):
    """Split the targets over all devices, of one machine or of many; no gradient crosses.

    A worker that is free takes the next target of a queue that all share. Noise depends on seed and
    target alone, so the results are the same for any number of workers. Chosen by itself where
    `trainer.devices` x `trainer.num_nodes` is more than 1.

    Args:
        patience: Seconds without a sign of life after which a worker counts as gone, and the others
            save and end.
        accelerator: Set by Lightning.
        parallel_devices: Set by Lightning.
        cluster_environment: Set by Lightning: its own launcher, torchrun, SLURM, LSF or MPI.
        checkpoint_io: Set by Lightning.
        precision_plugin: Set by Lightning.
    """

    strategy_name = "target_parallel"

    def __init__(
        self,
        patience: float = 120.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        self.ranks = Ranks.alone()
        self._patience = patience
        self._is_apart = False

    # ---- the start

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Meet the others at the store."""
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.world_size == 1:
            return
        assert isinstance(self._launcher, _Launcher)
        ended_rank = self._launcher.ended_rank
        store = _meet(self.cluster_environment, self.global_rank, ended_rank)
        self.ranks = Ranks(store, self.global_rank, self.world_size, ended_rank, self._patience)
        self.ranks.start_pulse()
        self.ranks.barrier(within=_MEET_WITHIN)

    def configure_ddp(self) -> None:
        """Nothing: the module stays as it is, on every worker its own."""

    def on_train_start(self) -> None:
        """From here on every worker goes at its own pace."""
        self._is_apart = True

    # ---- what Lightning calls to keep workers in step

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the others, before the first step."""
        if not self._is_apart:
            self.ranks.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """What worker 0 has, before the first step; afterwards each worker's own."""
        if self._is_apart:
            return obj
        value: T = self.ranks.broadcast(str(obj) if isinstance(obj, Path) else obj)
        return value

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Nothing to reduce."""
        return tensor

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


def _meet(
    environment: ClusterEnvironment, rank: int, ended_rank: Callable[[], tuple[int, str] | None]
) -> Store:
    """The store of the run: torchrun's, or worker 0's."""
    address, port = environment.main_address, environment.main_port
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + _MEET_WITHIN
    while True:
        try:
            return TCPStore(
                address,
                port,
                is_master=rank == 0 and not has_agent,
                wait_for_workers=False,
                timeout=_KNOCK,
            )
        except RuntimeError as error:
            if (ended := ended_rank()) or time.monotonic() > deadline or rank == 0:
                what = f"worker {ended[0]} has ended ({ended[1]})" if ended else str(error)
                raise RunStopped(
                    f"worker {rank} could not meet the others at {address}:{port}: {what}."
                ) from error


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, but a worker that dies does not kill the others: they save first."""

    def launch(
        self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the workers of this machine, unless torchrun, SLURM or the like did."""
        self._parent = os.getppid()
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            # Of a store that is gone torch prints a stack of C++ frames; a line of ours says it.
            before = os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            self._call_children_scripts()
            os.environ["TORCH_CPP_LOG_LEVEL"] = before
        _set_num_threads_if_needed(self.num_processes)
        result = function(*args, **kwargs)
        for process in self.procs:
            process.wait()
        return result

    def ended_rank(self) -> tuple[int, str] | None:
        """A worker of this machine that has ended too early, and how."""
        for local_rank, process in enumerate(self.procs, start=1):
            if code := process.poll():
                return self._first_rank + local_rank, _ending(code)
        is_ours = isinstance(self.cluster_environment, LightningEnvironment)
        if is_ours and self.cluster_environment.local_rank() and os.getppid() != self._parent:
            return self._first_rank, "its process is gone"
        return None

    @property
    def _first_rank(self) -> int:
        return self.cluster_environment.node_rank() * self.num_processes


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def ranks_of(strategy: Strategy) -> Ranks:
    """The workers of a run, or this process alone."""
    return strategy.ranks if isinstance(strategy, TargetParallelStrategy) else Ranks.alone()
