"""Checkpoints: at intervals, on a signal, and when the trainer's own limits end a run early."""

import signal
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from rich.console import Console

from dlmi.run.checkpoints import LAST, AtomicCheckpoints, checkpoint_name
from dlmi.run.folder import is_trial
from dlmi.run.inverter import Inverter

# Ctrl-C; what a scheduler sends before it kills; what SLURM sends before the time is up.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class RunCheckpoint(ModelCheckpoint):
    """Keep `checkpoints/last.ckpt` of the run up to date: every slot and the queue; no LM.

    Ctrl-C, SIGTERM and SIGUSR1 end the step, save and say how to resume; a second Ctrl-C stops at
    once. Each worker has a file of its own.

    Args:
        every_minutes: Minutes between two checkpoints.
        every_n_steps: Steps between two checkpoints, in place of minutes.

    Attributes:
        signal: What asked this process to stop, if anything did.
    """

    def __init__(self, every_minutes: float = 5.0, every_n_steps: int | None = None) -> None:
        super().__init__(
            filename=Path(LAST).stem,
            enable_version_counter=False,
            train_time_interval=None if every_n_steps else timedelta(minutes=every_minutes),
            every_n_train_steps=every_n_steps,
        )
        self.signal: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}  # those before the run's own

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose this worker's file and how it is written."""
        super().setup(trainer, pl_module, stage)
        trainer.strategy.checkpoint_io = AtomicCheckpoints()
        self.filename = Path(checkpoint_name(trainer.global_rank)).stem

    def state_dict(self) -> dict[str, Any]:
        """Nothing: there is one file, and a resumed run may save at other intervals."""
        return {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for signals."""
        super().on_train_start(trainer, pl_module)
        module: Any = pl_module

        def request_stop(signum: int, frame: FrameType | None) -> None:
            module.stop_requested = True
            self.signal = signal.Signals(signum)
            if isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
                # Not Ctrl-C again, which a terminal sends to all.
                trainer.strategy.launcher.kill(signal.SIGTERM)
            if signum == signal.SIGINT:
                signal.signal(signal.SIGINT, self._handlers[signal.SIGINT])
                if trainer.is_global_zero:
                    screen = Console(stderr=True)
                    screen.print("\nStopping after this step; Ctrl-C again stops at once.")

        try:
            for signum in _SIGNALS:
                self._handlers[signum] = signal.signal(signum, request_stop)
        except ValueError:  # not the main thread, where signals are handled
            self._handlers = {}

    def on_train_end(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Save what is unfinished; a run of several workers goes on from worker 0's file."""
        super().on_train_end(trainer, pl_module)
        workers = pl_module.workers
        leads_others = workers.size > 1 and workers.index == 0
        if (pl_module.active or leads_others) and not is_trial(trainer):
            path = Path(str(self.dirpath)) / checkpoint_name(workers.index)
            trainer.save_checkpoint(path, weights_only=False)  # with the optimizer's state

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """Restore the signal handlers; print how to resume once all workers here are done."""
        super().teardown(trainer, pl_module, stage)
        self._restore_handlers()
        was_stopped = pl_module.active or pl_module.stop_requested
        why = pl_module.workers.ended() or ("stopped" if was_stopped else None)
        if why and pl_module.unfinished and trainer.is_global_zero and not is_trial(trainer):
            folder = Path(str(self.dirpath))
            text = (
                f"{why}: {pl_module.unfinished} targets are not finished; those in flight are "
                f"saved. Resume with:\n  python -m dlmi fit --config "
                f"{folder.parent / 'config.yaml'} --ckpt_path {folder / LAST}"
            )
            screen = Console(stderr=True, soft_wrap=True, highlight=False)
            screen.print(text[0].upper() + text[1:], markup=False)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the signal handlers: Lightning calls no `teardown` after an error."""
        super().on_exception(trainer, pl_module, exception)
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}
