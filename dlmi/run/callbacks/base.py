"""Hooks of an inversion run, besides Lightning's own. Callbacks change no result."""

from lightning.pytorch import Callback, Trainer

from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.inverter import Inverter


class InversionCallback(Callback):
    """Base of callbacks that follow targets rather than batches."""

    continues = False  # whether the run goes on in a folder with rows, with or without a checkpoint

    def on_resume(self, trainer: Trainer, module: Inverter, kept: int, resumed: int) -> None:
        """Before the first step of a run that goes on: targets done, and those in a checkpoint."""

    def on_evaluation(self, trainer: Trainer, module: Inverter, slots: list[Slot]) -> None:
        """After discrete prompts were decoded; each slot's `last` and `best` are up to date."""

    def on_step_start(self, trainer: Trainer, module: Inverter, slots: list[Slot]) -> None:
        """Before a step of the slots in flight; no target is charged for the time it takes."""

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """When a target of this worker ends, before its slot is reused."""
