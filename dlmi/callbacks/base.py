"""Hooks of an inversion run, beside Lightning's own. Callbacks observe: none changes a result."""

from typing import TYPE_CHECKING

from lightning.pytorch import Callback, Trainer

if TYPE_CHECKING:
    from dlmi.inverter import Inverter
    from dlmi.results import Inversion
    from dlmi.slots import Slot


class InversionCallback(Callback):
    """Base of callbacks that follow targets rather than batches."""

    def on_evaluation(self, trainer: Trainer, module: "Inverter", slots: "list[Slot]") -> None:
        """After discrete prompts were decoded; each slot's `last` and `best` are up to date."""

    def on_step_start(self, trainer: Trainer, module: "Inverter", slots: "list[Slot]") -> None:
        """Before a step of the slots in flight; no target is charged for the time it takes."""

    def on_target_end(self, trainer: Trainer, module: "Inverter", row: "Inversion") -> None:
        """When a target is done with, before its slot is reused."""

    def earlier_rows(self) -> "list[Inversion]":
        """Rows that an earlier part of this run stored: their targets need no more work."""
        return []
