"""The progress bar: targets done, speed, honest LCS, time left; plain lines in a log file."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.callbacks.terminal import marked_output, summary_table
from dlmi.run.inverter import Inverter
from dlmi.targets.questions import HUB_MARK, PACKAGED_QUESTIONS
from dlmi.targets.sources import Questions
from dlmi.text import clock, visible

_SHOWN = 16  # slots in flight that the line has room for
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
        self._left_at_start = 0.0
        self._steps = 0
        self._shown = 0  # rows

    def disable(self) -> None:
        """Lightning turns all workers but the first off."""
        self._enabled = False

    def enable(self) -> None:
        """And on."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Say what runs on what, and open the bar."""
        if not self._enabled:
            return
        lm, workers = pl_module.lm, pl_module.workers.size
        parameters = lm.model.num_parameters() / 1e6
        self.console.print(
            f"{type(pl_module.method).__name__} on {lm.name} ({parameters:.1f}M parameters, "
            f"{lm.dtype_name}, {lm.device.type}): {len(pl_module.data.targets)} targets, "
            f"N={pl_module.prompt_length}, at most {pl_module.budget.steps} steps each, "
            f"{len(pl_module.slots)} at a time"
            + (f" on each of {workers} workers" if workers > 1 else ""),
            **_AS_IS,
        )
        if trainer.loggers:
            self.console.print(f"results and TensorBoard in {pl_module.folder}", **_AS_IS)
        self._started = self._last_line = time.monotonic()
        self._left_at_start = float(len(pl_module.data.targets))
        self._steps, self._shown = 0, len(pl_module.finished)
        if self.console.is_terminal:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("starting", total=1.0)
            self._bar.start()

    def on_resume(self, trainer: Trainer, module: Inverter, kept: int, resumed: int) -> None:
        """Say what the run goes on with."""
        self._left_at_start = float(len(module.data.targets) - kept)
        if self._enabled:
            self.console.print(
                f"goes on: {kept} targets are done, {resumed} go on where they stopped, "
                f"{self._left_at_start - resumed:.0f} start anew",
                **_AS_IS,
            )

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Trainer, pl_module: Inverter, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on by one step of each slot in flight."""
        if not self._enabled:
            return
        self._steps += len(pl_module.active)
        self._show_rows(pl_module)
        now = time.monotonic()
        if self._bar is not None:
            done = 1 - self._left(pl_module) / len(pl_module.data.targets)
            self._bar.update(self._task, completed=done, description=self._line(pl_module))
        elif now - self._last_line >= self.log_seconds:
            self._last_line = now
            print(self._line(pl_module), flush=True)

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Show it at once."""
        if self._enabled:
            self._show_rows(module)

    def _show_rows(self, module: Inverter) -> None:
        """Two lines for each target that is done, on any worker: how it ended, its best prompt."""
        for row in module.finished[self._shown :]:
            style = "bold green" if row.exact else "yellow" if row.lcs > 0 else "dim"
            line = Text.assemble(
                (f"{visible(row.target_id):<14}", "bold"),
                (f"LCS {row.lcs:.2f} ", style),
                f"{row.stop_reason} after {row.steps} steps, {row.seconds:.1f} s",
                f": {row.failure}\n  " if row.failure else "\n  ",
                (visible(row.prompt_text), "cyan"),
                " → ",
                marked_output(module.lm, row.target_ids, row.output_ids),
            )
            if not row.exact:
                line.append(f"  (target: {visible(row.target_text)})", "dim")
            self.console.print(line, soft_wrap=True)
        self._shown = len(module.finished)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar; the table comes when all rows are in."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """The table per difficulty; for a prompt to questions, how to count what it answers."""
        self.on_train_end(trainer, pl_module)
        if self._enabled and pl_module.finished:
            self._show_rows(pl_module)
            self.console.print(summary_table(pl_module.finished))
            source = pl_module.data.source
            if isinstance(source, Questions) and trainer.loggers:
                command = f"python -m dlmi score --results {pl_module.folder}"
                if source.source != PACKAGED_QUESTIONS:  # a file has no part that was held out
                    is_hub = source.source.startswith(HUB_MARK)
                    command += f" --examples {source.source if is_hub else 'OTHER_FILE.jsonl'}"
                self.console.print(f"how many questions it answers: {command}", **_AS_IS)

    @staticmethod
    def _left(module: Inverter) -> float:
        """Budgets still to be spent, if no target is solved early; all of others' in flight."""
        return module.unfinished - sum(module.budget.share_used(slot) for slot in module.active)

    def _line(self, module: Inverter) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        in_flight = [slot.best.lcs for slot in module.active if slot.best]
        shown = " ".join(f"{lcs:.2f}" for lcs in in_flight[:_SHOWN])
        more = f" and {len(in_flight) - _SHOWN} more" if len(in_flight) > _SHOWN else ""
        rows = module.finished
        mean = f"{sum(row.lcs for row in rows) / len(rows):.2f}" if rows else "-"
        left = self._left(module)
        spent = self._left_at_start - left
        time_left = clock(left / spent * elapsed) if spent > 0 else "?"
        here = " here" if module.workers.size > 1 else ""
        return (
            f"{len(rows)}/{len(module.data.targets)} targets · "
            f"{self._steps / elapsed:.2f} steps/s{here} · mean LCS {mean} · "
            f"in flight{here} {shown}{more} · at most {time_left} left"
        )
