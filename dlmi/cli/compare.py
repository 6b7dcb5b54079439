"""`python -m dlmi compare`: plan, run what is missing, show how it goes and what came of it."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlmi.cli.fit_plan import plan_fit
from dlmi.cli.parser import CommandParser
from dlmi.compare.cells import CellRun
from dlmi.compare.display import GridDisplay, print_plan
from dlmi.compare.grid import Grid, plan
from dlmi.errors import InputError
from dlmi.report.blocks import format_cell
from dlmi.report.estimates import mean_of, summarise
from dlmi.report.loading import Group, load
from dlmi.run.callbacks.results import lock_folder
from dlmi.text import visible


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m dlmi compare",
        usage="python -m dlmi compare --config FILE [options]",
        description=(
            "Run a grid of methods, prompt lengths and seeds over one set of targets. Each cell is "
            "an ordinary `fit`; run the same command again to go on where it stopped."
        ),
    )
    parser.add_argument("-c", "--config", action="config", help="A grid, YAML.")
    parser.add_class_arguments(Grid)
    parser.add_argument(
        "--dry_run", action="store_true", help="Print the plan and what it costs, run nothing."
    )
    parser.add_argument(
        "--speed",
        type=float | None,
        default=None,
        help="Token passes per second, for the plan; default: that of the cells that are done.",
    )
    return parser


def compare_command(arguments: list[str]) -> int:
    """Run a grid; exit code 1 where cells failed."""
    if not {"-c", "--config", "-h", "--help"} & {word.partition("=")[0] for word in arguments}:
        raise InputError(
            "Expected `--config` to name a grid, but got none. Try configs/compare/small.yaml."
        )
    parser = make_parser()
    config = parser.parse_args(arguments)
    if config.speed is not None and not config.speed > 0:
        raise InputError(f"Expected `--speed` to be positive, but got {config.speed}.")
    grid = _grid(parser.instantiate_classes(config))
    beside = Path(str(config.config[-1])).absolute().parent
    cells = plan(grid, beside, plan_fit)
    runs = [CellRun(grid, cell) for cell in cells]
    for run in runs:
        run.check_unchanged()
    if config.dry_run:
        print_plan(grid, runs, config.speed)
        return 0
    with lock_folder(Path(grid.out)):
        return _run_all(grid, runs)


def _grid(config: Namespace) -> Grid:
    return Grid(**{field.name: config[field.name] for field in fields(Grid)})


def _run_all(grid: Grid, runs: Sequence[CellRun]) -> int:
    display = GridDisplay(grid, runs)
    failed = []
    with display:
        for number, run in enumerate(runs, start=1):
            if run.seconds is not None:
                continue
            display.begin(number, run)
            error = run.run(display.tick)
            display.end(run, error)
            if error is not None:
                failed.append(run)
    screen = Console()
    if len(failed) < len(runs):
        screen.print(*map(_results_table, load([Path(grid.out)]).groups))
    for run in failed:
        text = f"failed: {run.cell.name} (log: {run.folder / 'log.txt'})"
        screen.print(text, markup=False, highlight=False, soft_wrap=True)
    print(f"figures and tables: python -m dlmi report {grid.out} --out {grid.out}/report")
    return 1 if failed else 0


def _results_table(group: Group) -> Table:
    """Per method and N at the full budget."""
    table = Table(
        title=Text(
            f"{visible(group.model)}, {visible(group.dtype)}: discrete prompt, free greedy decode, "
            "full budget",
            style="table.title",
        ),
        title_justify="left",
    )
    names = ("method", "N", "targets x seeds", "exact", "mean LCS", "as in code")
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right")
    for series in group.series:
        found = summarise(series, group.budgets[-1])
        table.add_row(
            Text(visible(series.label)),  # a plain string would be read as markup
            str(series.prompt_length),
            f"{found.targets} x {found.seeds}",
            f"{found.exact_rows}/{len(series.rows)}",
            *(format_cell(mean_of(number)) for number in (found.lcs, found.as_in_code)),
        )
    return table
