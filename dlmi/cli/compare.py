"""`python -m dlmi compare`: run a grid of methods and print a table."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from dlmi.cli.fit import plan_fit
from dlmi.cli.output import print_table
from dlmi.cli.parser import CommandParser
from dlmi.compare.cells import Cell
from dlmi.compare.display import GridDisplay, print_plan
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
        print_plan(grid, cells, speed)
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
