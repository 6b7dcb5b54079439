"""The cost of a comparison, and its progress."""

import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dlmi.compare.cells import Cell
from dlmi.compare.grid import Grid
from dlmi.rows import count_finished
from dlmi.text import clock, visible

_LOG_SECONDS = 60.0


class Cost:
    """The cost of some cells and how much of it is left; `unknown` counts cells without a cost."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        passes, shares = [cell.token_passes or 0 for cell in cells], [cell.share for cell in cells]
        done = [cell for cell in cells if cell.seconds is not None]
        self.cells, self.done = len(cells), len(done)
        self.unknown = sum(cell.token_passes is None for cell in cells)
        self.total = sum(passes)
        self.left = sum(p * (1 - share) for p, share in zip(passes, shares, strict=True))
        self.share = statistics.mean(shares) if self.unknown else 1 - self.left / self.total
        seconds = sum(cell.seconds or 0 for cell in done if cell.token_passes)
        self.speed = sum(cell.token_passes or 0 for cell in done) / seconds if seconds else None


class GridDisplay(Progress):
    """A progress bar for the whole grid on a terminal, a line per minute elsewhere."""

    def __init__(self, grid: Grid, cells: Sequence[Cell]) -> None:
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        console = Console()
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._cells = cells
        self._whole = self.add_task("", total=1.0)
        self._number = 0
        self._began = self._last_shown = 0.0
        cost = Cost(cells)
        self._say(f"{cost.cells} cells in {grid.out}, {cost.done} of them done")

    def begin(self, number: int) -> None:
        """A cell starts, by its number from 1."""
        self._number = number
        self._began, self._last_shown = time.monotonic(), 0.0
        self.tick()

    def tick(self) -> None:
        """Show the progress, unless it was shown a moment ago."""
        now = time.monotonic()
        if now - self._last_shown < (_LOG_SECONDS if self.disable else 1.0):
            return
        self._last_shown = now
        cost = Cost(self._cells)
        line = self._line(cost, now - self._began)
        self.update(self._whole, completed=cost.share, description=visible(line))
        if self.disable:
            self._say(line)

    def end(self, cell: Cell, error: str | None) -> None:
        """A cell has ended; `error` says why if it failed."""
        rows = f"{count_finished(cell.folder)} rows in {clock(cell.seconds or 0)}"
        self._say(f"{cell.name}: {rows if error is None else f'failed: {error}'}")

    def _line(self, cost: Cost, seconds: float) -> str:
        """Time left at the speed of the cells that are done, and the last line of this one."""
        left = "time left not known before a cell is done"
        rest = Cost(self._cells[self._number - 1 :])  # those before are done, or failed
        if rest.unknown:
            left = f"time left not known: the cost of {rest.unknown} cells is not"
        elif cost.speed:
            left = f"at most {clock(max(0.0, rest.left / cost.speed - seconds))} left"
        cell = self._cells[self._number - 1]
        first, *_, last = cell.latest_line.split(" · ") * 2  # `fit`'s progress line
        inside = f": {first}, {last}" if last.endswith("left") else ""
        place = f"cell {self._number} of {cost.cells}, {cost.done} done"
        return f"{place} · {left} · {cell.name}{inside}"

    def _say(self, text: str) -> None:
        self.console.print(visible(text), markup=False, highlight=False, soft_wrap=True)
