"""Hooks of an inversion run, beside Lightning's own. Callbacks observe: none changes a result."""

from typing import TYPE_CHECKING

from lightning.pytorch import Callback, Trainer

if TYPE_CHECKING:
    from dlmi.inverter import Inverter
    from dlmi.results import Inversion
    from dlmi.slots import Slot


class InversionCallback(Callback):
    """Base of callbacks that follow targets rather than batches.

    Attributes:
        continues: Whether the run goes on in a folder that holds what an earlier part of it wrote,
            even where it left no checkpoint.
    """

    continues = False

    def on_evaluation(self, trainer: Trainer, module: "Inverter", slots: "list[Slot]") -> None:
        """After discrete prompts were decoded; each slot's `last` and `best` are up to date."""

    def on_step_start(self, trainer: Trainer, module: "Inverter", slots: "list[Slot]") -> None:
        """Before a step of the slots in flight; no target is charged for the time it takes."""

    def on_target_end(self, trainer: Trainer, module: "Inverter", row: "Inversion") -> None:
        """When a target is done with, before its slot is reused."""

    def on_peer_target_end(self, trainer: Trainer, module: "Inverter", row: "Inversion") -> None:
        """On rank 0, when another rank is done with a target and has its row on disk."""

    def on_resume(self, trainer: Trainer, module: "Inverter", kept: int, resumed: int) -> None:
        """Before the first step of a run that goes on.

        Args:
            trainer: The trainer.
            module: The run.
            kept: Targets that are done with.
            resumed: Targets that go on from a checkpoint; all others start anew.
        """

    def on_waiting(self, trainer: Trainer, module: "Inverter") -> None:
        """A few times a second on rank 0, while it has nothing left to do but wait for others."""

    def earlier_rows(self) -> "list[Inversion]":
        """Rows that an earlier part of this run stored: their targets need no more work."""
        return []
