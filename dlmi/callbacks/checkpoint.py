"""Checkpoints: on a beat, on Ctrl-C, and when the trainer's own limits end a run early."""

import signal
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

if TYPE_CHECKING:
    from dlmi.inverter import Inverter


class RunCheckpoint(ModelCheckpoint):
    """Keep `checkpoints/last.ckpt` of the run up to date: Z, Phi, Adam, noise and queue; no LM.

    Ctrl-C ends the step, saves and says how to resume; a second Ctrl-C stops at once.

    Args:
        every_minutes: Minutes between two checkpoints.
        every_n_steps: Steps between two checkpoints, in place of minutes.
    """

    def __init__(self, every_minutes: float = 5.0, every_n_steps: int | None = None) -> None:
        super().__init__(
            filename="last",
            enable_version_counter=False,
            train_time_interval=None if every_n_steps else timedelta(minutes=every_minutes),
            every_n_train_steps=every_n_steps,
        )
        self._previous_handler: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: there is one file, and a resumed run may choose another beat."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take back."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for Ctrl-C."""
        super().on_train_start(trainer, pl_module)
        module: Any = pl_module

        def request_stop(signum: int, frame: FrameType | None) -> None:
            module.stop_requested = True
            signal.signal(signal.SIGINT, self._previous_handler)
            Console(stderr=True).print("\nStopping after this step; Ctrl-C again stops at once.")

        try:
            self._previous_handler = signal.signal(signal.SIGINT, request_stop)
        except ValueError:  # not the main thread: whoever owns it handles Ctrl-C
            self._previous_handler = None

    def on_train_end(self, trainer: Trainer, pl_module: "Inverter") -> None:  # type: ignore[override]
        """Save what is unfinished and say how to go on."""
        super().on_train_end(trainer, pl_module)
        if not (pl_module.active or pl_module.queue):
            return
        path = Path(self.dirpath or trainer.default_root_dir) / "last.ckpt"
        trainer.save_checkpoint(path, weights_only=False)  # False: with optimiser and queue
        config = path.parent.parent / "config.yaml"
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"Stopped with {len(pl_module.active)} targets in flight and {len(pl_module.queue)} "
            f"waiting. Resume with:\n  python -m dlmi fit --config {config} --ckpt_path {path}",
            markup=False,
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give Ctrl-C back."""
        super().teardown(trainer, pl_module, stage)
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None
