"""What a comparison shows of itself: its plan, and how far it is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from dlmi.compare.cells import CellRun
from dlmi.compare.grid import Grid
from dlmi.text import clock, visible

_LOG_SECONDS = 60.0


@dataclass
class _Cost:
    """Of some cells: how many, what of them is done with, and at which speed.

    Token passes are those of cells whose cost is known; `unknown` counts the others.
    """

    cells: int
    done: int
    unknown: int
    share: float
    token_passes: float
    done_passes: float
    speed: float | None

    @classmethod
    def of(cls, runs: Sequence[CellRun]) -> "_Cost":
        """As it stands on disk."""
        done = [run for run in runs if run.seconds is not None]
        known = [run for run in done if run.cell.token_passes]
        passes = sum(run.cell.token_passes or 0 for run in known)
        seconds = sum(run.seconds or 0 for run in known)
        shares = {run.cell.name: _share(run) for run in runs if run not in done}
        partly = sum(
            shares[run.cell.name] * (run.cell.token_passes or 0) for run in runs if run not in done
        )
        return cls(
            cells=len(runs),
            done=len(done),
            unknown=sum(run.cell.token_passes is None for run in runs),
            share=(len(done) + sum(shares.values())) / len(runs) if runs else 1.0,
            token_passes=sum(run.cell.token_passes or 0 for run in runs),
            done_passes=passes + partly,
            speed=passes / seconds if seconds and passes else None,
        )


def _share(run: CellRun) -> float:
    return min(run.finished_rows / run.cell.targets, 1.0) if run.cell.targets else 0.0


class GridDisplay:
    """A bar for the whole grid on a terminal, lines elsewhere; time left by cost."""

    def __init__(self, grid: Grid, runs: Sequence[CellRun]) -> None:
        self.console = Console()
        self._runs = runs
        self._out = grid.out
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._current: CellRun | None = None
        self._number = 0
        self._began = self._last_shown = 0.0
        self._task: Any = None

    def __enter__(self) -> "GridDisplay":
        start = _Cost.of(self._runs)
        self._say(f"{start.cells} cells in {self._out}, {start.done} of them done")
        if self.console.is_terminal:
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.console.is_terminal:
            self._bar.stop()

    def begin(self, number: int, run: CellRun) -> None:
        """A cell starts."""
        self._current = run
        self._number = number
        self._began = time.monotonic()
        self._last_shown = 0.0
        self.tick()

    def tick(self) -> None:
        """Show how far it is."""
        now = time.monotonic()
        if now - self._last_shown < (1.0 if self.console.is_terminal else _LOG_SECONDS):
            return
        self._last_shown = now
        cost = _Cost.of(self._runs)
        line = self._line(cost, now)
        if self.console.is_terminal:
            done = cost.share if cost.unknown else cost.done_passes / cost.token_passes
            self._bar.update(self._task, completed=done, description=visible(line))
        else:
            self._say(line)

    def end(self, run: CellRun, error: str | None) -> None:
        """A cell is over; `error` says why if it failed."""
        if error is not None:
            self._say(f"{run.cell.name}: failed: {error}")
        else:
            self._say(f"{run.cell.name}: {run.finished_rows} rows in {clock(run.seconds or 0)}")

    def _line(self, cost: _Cost, now: float) -> str:
        """Time left at the speed of the cells that are done, and what the running cell says."""
        left = "time left not known before a cell is done"
        rest = _Cost.of(self._runs[self._number - 1 :])  # those before are done, or failed
        if rest.unknown:
            left = f"time left not known: the cost of {rest.unknown} cells is not"
        elif cost.speed:
            at_most = (rest.token_passes - rest.done_passes) / cost.speed - (now - self._began)
            left = f"at most {clock(max(0.0, at_most))} left"
        line = f"cell {self._number} of {cost.cells}, {cost.done} done · {left}"
        if self._current is None:
            return line
        said = self._current.latest_line  # its own account of itself, from its log
        first, *_, last = said.split(" · ") * 2
        inside = f": {first}, {last}" if last.endswith("left") else ""
        return f"{line} · {self._current.cell.name}{inside}"

    def _say(self, text: str) -> None:
        self.console.print(visible(text), markup=False, highlight=False, soft_wrap=True)


def print_plan(grid: Grid, runs: Sequence[CellRun], speed: float | None) -> None:
    """All cells with what they cost, and the sum.

    Args:
        grid: The comparison.
        runs: Its cells.
        speed: Token passes per second; None for that of the cells that are done.
    """
    cost = _Cost.of(runs)
    speed = speed or cost.speed
    print(f"{cost.cells} cells in {grid.out}, {cost.done} of them done")
    table = Table()
    table.add_column("run", overflow="fold")
    for name in ("seeds", "targets", "token passes at most", "hours", "done"):
        table.add_column(name, justify="right")
    for place in dict.fromkeys(run.cell.place for run in runs):
        here = [run for run in runs if run.cell.place == place]
        part, targets = _Cost.of(here), here[0].cell.targets
        table.add_row(
            place,
            str(part.cells),
            "?" if targets is None else str(targets),
            "unknown" if part.unknown else f"{part.token_passes:,}",
            f"{part.token_passes / speed / 3600:.2f}" if speed and not part.unknown else "?",
            f"{part.share:.0%}" if part.unknown else f"{part.done_passes / part.token_passes:.0%}",
        )
    screen = Console()
    screen.print(table)
    left = cost.token_passes - cost.done_passes
    unit = "steps" if grid.axis == "step" else "token passes"
    for budgets, lengths in _lengths_by_budgets(grid).items():
        of_size = "" if not grid.sizes else f" (N = {', '.join(map(str, lengths))})"
        values = ", ".join(f"{budget:,}" for budget in budgets)
        print(f"budgets: {values} {unit} per target{of_size}, all read from the longest's traces")
    print(f"{cost.token_passes:,} token passes at most in all, {left:,.0f} of them left")
    if cost.unknown:
        print(
            f"not counted: {cost.unknown} cells whose cost only their runs will know (a search "
            "counted in steps, or targets that the LM has to encode); `token_budgets` bound it"
        )
    if speed:
        print(f"at {speed:,.0f} token passes per second: {left / speed / 3600:.1f} hours left")
    else:
        print("hours: give `--speed`, or run a cell; `python -m dlmi bench` measures it")


def _lengths_by_budgets(grid: Grid) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for size in grid.all_sizes:
        found.setdefault(tuple(size.budgets or ()), []).append(size.prompt_length)
    return found
