"""The progress bar: targets done, speed, honest LCS, time left; plain lines in a log file."""

import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from dlmi.callbacks.base import InversionCallback
from dlmi.display import clock, marked_output, summary_table, visible

if TYPE_CHECKING:
    from dlmi.inverter import Inverter
    from dlmi.results import Inversion


_AS_IS: Any = {"highlight": False, "markup": False, "soft_wrap": True}


class InversionProgress(InversionCallback, ProgressBar):
    """Show a run as it goes, and a table per difficulty at its end.

    Args:
        log_seconds: Seconds between two lines where there is no terminal to draw on.
    """

    def __init__(self, log_seconds: float = 30.0) -> None:
        super().__init__()
        self.log_seconds = log_seconds
        self.console = Console()
        self._bar: Progress | None = None
        self._task: Any = None
        self._enabled = True
        self._started = 0.0
        self._last_line = 0.0
        self._steps = 0
        self._shares = 0.0

    def disable(self) -> None:
        """Lightning turns all ranks but the first off."""
        self._enabled = False

    def enable(self) -> None:
        """And on."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: "Inverter") -> None:  # type: ignore[override]
        """Say what runs on what, and open the bar."""
        if not self._enabled:
            return
        lm = pl_module.lm
        parameters = sum(p.numel() for p in lm.model.parameters()) / 1e6
        dtype = str(lm.dtype).removeprefix("torch.")
        self.console.print(
            f"{type(pl_module).__name__} on {lm.name} ({parameters:.1f}M parameters, {dtype}, "
            f"{lm.device.type}): {len(pl_module.data.targets)} targets, N={pl_module.prompt_length}"
            f", at most {pl_module.budget.steps} steps each, {len(pl_module.slots)} at a time",
            **_AS_IS,
        )
        if trainer.log_dir:
            self.console.print(f"results and TensorBoard in {trainer.log_dir}", **_AS_IS)
        self._started = self._last_line = time.monotonic()
        self._steps = 0
        self._shares = 0.0
        if self.console.is_terminal:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("starting", total=1.0)
            self._bar.start()

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Trainer, pl_module: "Inverter", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on by one step of each slot in flight."""
        if not self._enabled:
            return
        self._steps += len(pl_module.active)
        used = pl_module.budget.share_used
        self._shares += sum(used(slot) / slot.step for slot in pl_module.active)
        now = time.monotonic()
        if self._bar is not None:
            done = 1 - self._left(pl_module) / len(pl_module.data.targets)
            self._bar.update(self._task, completed=done, description=self._line(pl_module))
        elif now - self._last_line >= self.log_seconds:
            self._last_line = now
            print(self._line(pl_module), flush=True)

    def on_target_end(self, trainer: Trainer, module: "Inverter", row: "Inversion") -> None:
        """Two lines for each target that is done: how it ended, and its best prompt."""
        if not self._enabled:
            return
        style = "bold green" if row.exact else "yellow" if row.lcs > 0 else "dim"
        line = Text.assemble(
            (f"{row.target_id:<14}", "bold"),
            (f"LCS {row.lcs:.2f} ", style),
            f"{row.stop_reason} after {row.steps} steps, {row.seconds:.1f} s\n  ",
            (visible(row.prompt_text), "cyan"),
            " → ",
            marked_output(module.lm, row.target_ids, row.output_ids),
        )
        if not row.exact:
            line.append(f"  (target: {visible(row.target_text)})", "dim")
        self.console.print(line, soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar; the table comes when all rows are in."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def teardown(self, trainer: Trainer, pl_module: "Inverter", stage: str) -> None:  # type: ignore[override]
        """The table per difficulty."""
        self.on_train_end(trainer, pl_module)
        if self._enabled and pl_module.finished:
            self.console.print(summary_table(pl_module.finished))

    @staticmethod
    def _left(module: "Inverter") -> float:
        """Budgets still to be spent, if no target is solved early."""
        return len(module.queue) + sum(1 - module.budget.share_used(s) for s in module.active)

    def _line(self, module: "Inverter") -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        finished = len(module.data.targets) - len(module.queue) - len(module.active)
        best = " ".join(f"{slot.best.lcs:.2f}" for slot in module.active if slot.best)
        mean = (
            f"{sum(row.lcs for row in module.finished) / len(module.finished):.2f}"
            if module.finished
            else "-"
        )
        left = clock(self._left(module) / self._shares * elapsed) if self._shares else "?"
        return (
            f"{finished}/{len(module.data.targets)} targets · "
            f"{self._steps / elapsed:.2f} steps/s · mean LCS {mean} · in flight {best} · "
            f"at most {left} left"
        )
