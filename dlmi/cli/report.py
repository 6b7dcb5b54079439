"""`python -m dlmi report RUNS... --out DIR`: figures, tables and one page from result files."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError

if TYPE_CHECKING:
    from dlmi.report.gradient_sets import GradientSet
    from dlmi.report.loading import Loaded
    from dlmi.report.parts import ReportTable
    from dlmi.report.styles import Drawing

PAGE = "report.html"
TEXT = "report.md"


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m dlmi report",
        usage="python -m dlmi report RUNS... --out DIR [options]",
        description=(
            "Turn runs into figures (PNG, PDF, SVG), tables (Markdown, CSV, LaTeX), a text that "
            "ties them together and one HTML page. No LM is loaded. Runs of different LMs or "
            "target sets are shown apart."
        ),
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="Folders with a results.jsonl or a gradients.jsonl somewhere below, or such files.",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="Folder to write; must be new or empty."
    )
    parser.add_argument(
        "--steps",
        type=list[int] | None,
        default=None,
        help="Steps at which runs are read, such as [256,2048]. Default: those of the comparison, "
        "else the end of the run.",
    )
    return parser


def report_command(arguments: list[str]) -> int:
    """Read, draw and write."""
    config = make_parser().parse_args(arguments)
    check_new_folder(config.out)
    if config.steps is not None and min(config.steps, default=0) < 1:
        raise InputError(f"Expected `--steps` to be positive numbers, but got {config.steps}.")
    write_report(config.runs, config.out, config.steps)
    print(f"report in {config.out}: open {config.out / PAGE} or {config.out / TEXT}")
    return 0


def write_report(runs: Sequence[Path], out: Path, steps: Sequence[int] | None = None) -> None:
    """The whole report; nothing is written before all of it has been made.

    Args:
        runs: Folders or files.
        out: Folder to write.
        steps: As the option of the command.
    """
    # Here, since drawing and statistics would slow down the start of every other command.
    from dlmi.report.gradient_sets import read_gradients
    from dlmi.report.loading import load
    from dlmi.report.page import write_page
    from dlmi.report.writing import write_figures, write_tables, write_text

    loaded = load(runs, steps)
    gradients, notes = read_gradients(loaded.gradients)
    if not loaded.groups and not gradients:
        raise InputError(
            f"Expected RUNS to hold result or gradient rows, but {', '.join(map(str, runs))} has "
            f"none{': ' + notes[0] if notes else ''}."
        )
    loaded = dataclasses.replace(loaded, notes=(*loaded.notes, *notes))
    drawings = _draw(loaded, gradients)
    tables = _tabulate(loaded, gradients)
    out.mkdir(parents=True, exist_ok=True)
    figures = write_figures(out / "figures", drawings)
    write_tables(out / "tables", tables)
    write_text(out / TEXT, loaded, figures, tables)
    write_page(out / PAGE, loaded, figures, tables)


def check_new_folder(out: Path) -> None:
    """Raise `InputError` unless a folder can be filled without overwriting anything."""
    if os.path.lexists(out) and not out.is_dir():
        raise InputError(f"Expected `--out` to be a folder, but {out} is a file.")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"Expected `--out` to be a new or empty folder, but {out} is not empty.")
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise InputError(f"Expected `--out` to be in a folder, but {existing} is a file.")


def _draw(loaded: "Loaded", gradients: "Sequence[GradientSet]") -> "list[Drawing]":
    from dlmi.report.bars import draw_bars
    from dlmi.report.curves import draw_anytime, draw_temperature
    from dlmi.report.violins import draw_violins

    return [
        *draw_bars(loaded),
        *draw_anytime(loaded, "step"),
        *draw_anytime(loaded, "token_passes"),
        *draw_temperature(loaded),
        *draw_violins(gradients),
    ]


def _tabulate(loaded: "Loaded", gradients: "Sequence[GradientSet]") -> "list[ReportTable]":
    from dlmi.report import prompt_tables, tables
    from dlmi.report.claims import claims_table
    from dlmi.report.gradient_sets import ks_table

    made = [
        tables.group_table(loaded),
        tables.summary_table(loaded),
        claims_table(loaded, gradients),
        tables.lcs_matrix_table(loaded),
        prompt_tables.overlap_table(loaded),
        prompt_tables.round_trip_table(loaded),
        ks_table(gradients),
        prompt_tables.prompt_table(loaded),
        *tables.settings_tables(loaded),
    ]
    return [table for table in made if table is not None and table.rows]
