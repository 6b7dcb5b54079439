"""`python -m dlmi compare`: run a grid of methods and print a table."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from dlmi.cli.fit import plan_fit
from dlmi.cli.output import print_table
from dlmi.cli.parser import CommandParser
from dlmi.compare.cells import Cell
from dlmi.compare.display import Cost, GridDisplay
from dlmi.compare.grid import Grid, plan
from dlmi.errors import InputError
from dlmi.report.blocks import format_cell
from dlmi.report.estimates import summarise
from dlmi.report.loading import Group, load
from dlmi.run.callbacks.results import lock_folder
from dlmi.text import visible


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser.of("compare", compare, "--config FILE [options]", {"grid", "folder"})
    parser.add_argument("-c", "--config", action="config", help="A grid, YAML.")
    parser.add_class_arguments(Grid)
    return parser


def compare_command(arguments: list[str]) -> int:
    """Read the grid and run it; returns the exit code."""
    if not {"-c", "--config", "-h", "--help"} & {word.partition("=")[0] for word in arguments}:
        raise InputError(
            "Expected `--config` to name a grid, but got none. Try configs/compare/small.yaml."
        )
    options = make_parser().read(arguments)
    folder = Path(str(options.pop("config")[-1])).absolute().parent
    grid = Grid(**{field.name: options.pop(field.name) for field in fields(Grid)})
    return compare(grid, folder, **options)


def compare(grid: Grid, folder: Path, dry_run: bool = False, speed: float | None = None) -> int:
    """Run a grid of methods, prompt lengths and seeds over one set of targets.

    Each cell is an ordinary `fit`. The same command continues a comparison that was stopped. Exit
    code 1 where cells failed.

    Args:
        grid: The comparison.
        folder: Folder of the grid's file.
        dry_run: Print the plan and its cost, run nothing.
        speed: Token passes per second, for the plan; default: that of finished cells.
    """
    if speed is not None and not speed > 0:
        raise InputError(f"Expected `--speed` to be positive, but got {speed}.")
    cells = plan(grid, folder, plan_fit)
    for cell in cells:
        cell.check_unchanged()
    if dry_run:
        _print_plan(grid, cells, speed)
        return 0
    with lock_folder(Path(grid.out)):
        return _run_all(grid, cells)


def _run_all(grid: Grid, cells: Sequence[Cell]) -> int:
    """Run the cells that are not done, then print the results; returns the exit code."""
    failed = []
    with GridDisplay(grid, cells) as display:
        for number, cell in enumerate(cells, start=1):
            if cell.seconds is not None:
                continue
            display.begin(number)
            error = cell.run(display.tick)
            display.end(cell, error)
            if error is not None:
                failed.append(cell)
    if len(failed) < len(cells):
        for group in load([Path(grid.out)]).groups:
            _print_results(group)
    for cell in failed:
        print(f"failed: {visible(cell.name)} (log: {visible(str(cell.log))})")
    print(f"figures and tables: python -m dlmi report {grid.out} --out {grid.out}/report")
    return 1 if failed else 0


def _print_plan(grid: Grid, cells: Sequence[Cell], speed: float | None) -> None:
    """Print all cells with their cost; the speed defaults to that of the cells that are done."""
    cost = Cost(cells)
    speed = speed or cost.speed
    print(f"{cost.cells} cells in {grid.out}, {cost.done} of them done")
    lines = []
    for place in dict.fromkeys(cell.place for cell in cells):
        alike = [cell for cell in cells if cell.place == place]
        part, targets = Cost(alike), alike[0].targets
        total = "unknown" if part.unknown else f"{part.total:,}"
        hours = f"{part.total / speed / 3600:.2f}" if speed and not part.unknown else "?"
        count = "?" if targets is None else targets
        lines.append((place, part.cells, count, total, hours, f"{part.share:.0%}"))
    columns = ("run", "seeds", "targets", "token passes at most", "hours", "done")
    print_table("", columns, lines, texts=["run"])
    unit = "steps" if grid.axis == "step" else "token passes"
    for size in grid.all_sizes if grid.sizes else grid.all_sizes[:1]:
        values = ", ".join(f"{budget:,}" for budget in size.budgets)
        of_size = f" (N = {size.prompt_length})" if grid.sizes else ""
        print(f"budgets: {values} {unit} per target{of_size}, all read from the longest's traces")
    print(f"{cost.total:,} token passes at most in all, {cost.left:,.0f} of them left")
    if cost.unknown:
        print(
            f"not counted: {cost.unknown} cells whose cost is known only after the run (a search "
            "with a budget in steps, or targets that the LM encodes); `token_budgets` limit it"
        )
    if speed:
        print(f"at {speed:,.0f} token passes per second: {cost.left / speed / 3600:.1f} hours left")
    else:
        print("hours: give `--speed`, or run a cell; `python -m dlmi bench` measures it")


def _print_results(group: Group) -> None:
    """Print a line for each method and N, at the full budget."""
    lines = []
    for series in group.series:
        found = summarise(series, group.budgets[-1])
        seeds = len({row.seed for row in series.rows})
        sizes = f"{found.lcs.targets} x {seeds}", f"{found.exact_rows}/{len(series.rows)}"
        means = (format_cell(number.mean) for number in (found.lcs, found.as_in_code))
        lines.append((series.label, series.prompt_length, *sizes, *means))
    title = f"{group.model}, {group.dtype}: discrete prompt, free greedy decode, full budget"
    columns = ("method", "N", "targets x seeds", "exact", "mean LCS", "as in code")
    print_table(title, columns, lines, texts=["method"])
