"""Hooks of an inversion run, beside Lightning's own. Callbacks observe: none changes a result."""

from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback, Trainer

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.base import Method
from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.budget import Budget
from dlmi.run.data import TargetDataModule
from dlmi.run.queue import TargetQueue
from dlmi.run.workers.news import News
from dlmi.run.workers.workers import Ranks


class InversionRun(Protocol):
    """What callbacks see of an `Inverter`; its attributes are explained there."""

    method: Method[Any]
    prompt_length: int
    budget: Budget
    ranks: Ranks
    news: News
    queue: TargetQueue
    finished: list[Inversion]
    folder: Path
    stop_requested: bool

    @property
    def data(self) -> TargetDataModule:
        """The data module of the run."""

    @property
    def lm(self) -> FrozenLM:
        """The frozen LM."""

    @property
    def slots(self) -> list[Slot | None]:
        """The targets in flight; None where there is none."""

    @property
    def active(self) -> list[Slot]:
        """The slots in flight."""

    def check_same_run(self, row: Inversion) -> None:
        """Raise `InputError` unless a row could have come from this very run."""


class InversionCallback(Callback):
    """Base of callbacks that follow targets rather than batches.

    Attributes:
        continues: Whether the run goes on in a folder that holds what an earlier part of it wrote,
            even where it left no checkpoint.
    """

    continues = False

    def on_evaluation(self, trainer: Trainer, module: InversionRun, slots: list[Slot]) -> None:
        """After discrete prompts were decoded; each slot's `last` and `best` are up to date."""

    def on_step_start(self, trainer: Trainer, module: InversionRun, slots: list[Slot]) -> None:
        """Before a step of the slots in flight; no target is charged for the time it takes."""

    def on_target_end(self, trainer: Trainer, module: InversionRun, row: Inversion) -> None:
        """When a target is done with, before its slot is reused."""

    def on_peer_target_end(self, trainer: Trainer, module: InversionRun, row: Inversion) -> None:
        """On worker 0, when another worker is done with a target and has its row on disk."""

    def on_resume(self, trainer: Trainer, module: InversionRun, kept: int, resumed: int) -> None:
        """Before the first step of a run that goes on.

        Args:
            trainer: The trainer.
            module: The run.
            kept: Targets that are done with.
            resumed: Targets that go on from a checkpoint; all others start anew.
        """

    def on_waiting(self, trainer: Trainer, module: InversionRun) -> None:
        """A few times a second on worker 0, while it only waits for others."""

    def earlier_rows(self) -> list[Inversion]:
        """Rows that an earlier part of this run stored: their targets need no more work."""
        return []
