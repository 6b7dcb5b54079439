"""The progress bar: targets done, speed, honest LCS, time left; in a log file, plain lines."""

import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from dlmi.metrics import lcs_members
from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.callbacks.results import ResultWriter
from dlmi.run.folder import is_trial
from dlmi.run.inverter import Inverter
from dlmi.targets.questions import HUB_MARK, PACKAGED_QUESTIONS
from dlmi.targets.sources import Questions
from dlmi.text import Decoder, clock, counted, token_texts, visible

_SHOWN = 16  # slots in flight that the line has room for


class InversionProgress(InversionCallback, ProgressBar):
    """Show a run as it goes, and a table per difficulty at its end.

    Args:
        log_seconds: Seconds between two lines where there is no terminal to draw on.
    """

    def __init__(self, log_seconds: float = 30.0) -> None:
        super().__init__()
        self.log_seconds = log_seconds
        self.console = Console()
        self._bar: Progress
        self._started = self._last_line = 0.0
        self._left_at_start = 0.0
        self._steps = 0
        self._shown = 0  # rows

    def disable(self) -> None:
        """Show nothing; Lightning calls it on all workers but the first."""
        self.console.quiet = True

    def enable(self) -> None:
        """The inverse of `disable`."""
        self.console.quiet = False

    def on_train_start(self, trainer: Trainer, pl_module: Inverter) -> None:  # type: ignore[override]
        """Say what runs on what, and open the bar."""
        lm, workers, targets = pl_module.lm, pl_module.workers.size, len(pl_module.data.targets)
        self._print(
            f"{type(pl_module.method).__name__} on {lm.name} "
            f"({lm.model.num_parameters() / 1e6:.1f}M parameters, {lm.dtype_name}, "
            f"{lm.device.type}): {counted(targets, 'target')}, N={pl_module.prompt_length}, "
            f"at most {counted(pl_module.steps, 'step')} each, {len(pl_module.slots)} at a time"
            + (f" on each of {workers} workers" if workers > 1 else "")
        )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        written = ["results" for callback in callbacks if isinstance(callback, ResultWriter)]
        written += [type(logger).__name__.removesuffix("Logger") for logger in trainer.loggers]
        if written and not is_trial(trainer):
            self._print(f"{' and '.join(written)} in {pl_module.folder}")
        self._started = self._last_line = time.monotonic()
        self._left_at_start = float(targets)
        self._steps, self._shown = 0, len(pl_module.finished)
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=self.console,
            transient=True,
            disable=self.console.quiet or not self.console.is_terminal,
        )
        self._bar.add_task("starting", total=1.0)
        self._bar.start()

    def on_resume(self, trainer: Trainer, module: Inverter, kept: int, resumed: int) -> None:
        """Say what the run goes on with."""
        self._left_at_start = float(len(module.data.targets) - kept)
        self._print(
            f"goes on: {kept} targets are done, {resumed} go on where they stopped, "
            f"{self._left_at_start - resumed:.0f} start anew"
        )

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Trainer, pl_module: Inverter, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on by one step of each slot in flight."""
        self._steps += len(pl_module.active)
        self._show_rows(pl_module)
        if not self._bar.disable:
            done = 1 - _left(pl_module) / len(pl_module.data.targets)
            [task] = self._bar.task_ids
            self._bar.update(task, completed=done, description=self._line(pl_module))
        elif time.monotonic() - self._last_line >= self.log_seconds:
            self._last_line = time.monotonic()
            self._print(self._line(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar; the table comes when the rows of all workers are read."""
        self._bar.stop()

    def teardown(self, trainer: Trainer, pl_module: Inverter, stage: str) -> None:  # type: ignore[override]
        """The table per difficulty; for a prompt to questions, how to count what it answers."""
        if not pl_module.finished:
            return
        self._show_rows(pl_module)
        self.console.print(summary_table(pl_module.finished))
        source = pl_module.data.source
        if isinstance(source, Questions) and trainer.loggers:
            command = f"python -m dlmi score --results {pl_module.folder}"
            if source.source != PACKAGED_QUESTIONS:  # a file has no part that was held out
                is_hub = source.source.startswith(HUB_MARK)
                command += f" --examples {source.source if is_hub else 'OTHER_FILE.jsonl'}"
            self._print(f"how many questions it answers: {command}")

    def _print(self, line: str) -> None:
        """A line as it is: rich would colour numbers, read brackets as markup and wrap."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _show_rows(self, module: Inverter) -> None:
        """Two lines for each finished target, of any worker: how it ended, its best prompt."""
        for row in module.finished[self._shown :]:
            style = "bold green" if row.exact else "yellow" if row.lcs > 0 else "dim"
            line = Text.assemble(
                (f"{visible(row.target_id):<14}", "bold"),
                (f"LCS {row.lcs:.2f} ", style),
                f"{row.stop_reason} after {counted(row.steps, 'step')}, {row.seconds:.1f} s",
                f": {row.failure}\n  " if row.failure else "\n  ",
                (visible(row.prompt_text), "cyan"),
                " → ",
                marked_output(module.lm, row.target_ids, row.output_ids),
            )
            if not row.exact:
                line.append(f"  (target: {visible(row.target_text)})", "dim")
            self.console.print(line, soft_wrap=True)
        self._shown = len(module.finished)

    def _line(self, module: Inverter) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        in_flight = [f"{slot.best.lcs:.2f}" for slot in module.active if slot.best]
        more = f" and {len(in_flight) - _SHOWN} more" if len(in_flight) > _SHOWN else ""
        rows = module.finished
        mean = f"{fmean(row.lcs for row in rows):.2f}" if rows else "-"
        left = _left(module)
        spent = self._left_at_start - left
        time_left = clock(left / spent * elapsed) if spent > 0 else "?"
        here = " here" if module.workers.size > 1 else ""
        return (
            f"{len(rows)}/{len(module.data.targets)} targets · "
            f"{self._steps / elapsed:.2f} steps/s{here} · mean LCS {mean} · "
            f"in flight{here} {' '.join(in_flight[:_SHOWN])}{more} · at most {time_left} left"
        )


def _left(module: Inverter) -> float:
    """Budgets, one per target, still to be spent if no target is solved early."""
    return module.unfinished - sum(module.budget.share_used(slot) for slot in module.active)


def marked_output(lm: Decoder, target_ids: Sequence[int], output_ids: Sequence[int]) -> Text:
    """An output for the terminal: tokens of the LCS in green, others in red."""
    members = lcs_members(target_ids, output_ids)
    tokens = zip(token_texts(lm, output_ids), members, strict=True)
    return Text.assemble(*((token, "green" if is_member else "red") for token, is_member in tokens))


def summary_table(rows: Sequence[Inversion]) -> Table:
    """Per difficulty: targets, exact, mean honest LCS; median steps, cost and seconds in a slot."""
    title = "Honest results: discrete prompt, free greedy decode (steps and on: medians)"
    table = Table(title=title, title_justify="left")
    names = ("k", "targets", "exact", "mean LCS", "as in code", "steps", "token passes", "seconds")
    for name in names:
        table.add_column(name, justify="right")
    groups = sorted({row.k for row in rows}, key=lambda k: (k is None, k))
    for k in groups:
        table.add_row("-" if k is None else str(k), *_cells([r for r in rows if r.k == k]))
    if len(groups) > 1:
        table.add_section()
        table.add_row("all", *_cells(rows))
    return table


def _cells(rows: Sequence[Inversion]) -> list[str]:
    soft = [row.as_in_code_lcs for row in rows if row.as_in_code_lcs is not None]
    return [
        str(len(rows)),
        str(sum(row.exact for row in rows)),
        f"{fmean(row.lcs for row in rows):.3f}",
        f"{fmean(soft):.3f}" if soft else "-",
        f"{median(row.steps for row in rows):g}",
        f"{median(row.forward_tokens + row.backward_tokens for row in rows):,.0f}",
        f"{median(row.seconds for row in rows):.0f}",
    ]
