"""`python -m dlmi report RUNS... --out DIR`: figures, tables and one page from result files."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError

PAGE = "report.html"
TEXT = "report.md"

_LOOK_SECONDS = 10  # between two looks for new rows


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
        type=list[int],
        default=[],
        help="Steps at which runs are read, such as [256,2048]. Default: those of the comparison, "
        "else the end of the run.",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="Write everything anew as rows come, until Ctrl-C; the page loads itself again.",
    )
    return parser


def report_command(arguments: list[str]) -> int:
    """Read, draw and write."""
    config = make_parser().parse_args(arguments)
    check_new_folder(config.out)
    if min(config.steps, default=1) < 1:
        raise InputError(f"Expected `--steps` to be positive numbers, but got {config.steps}.")
    if config.watch:
        _watch(config.runs, config.out, config.steps)
    else:
        write_report(config.runs, config.out, config.steps)
    print(f"report in {config.out}: open {config.out / PAGE} or {config.out / TEXT}")
    return 0


def write_report(
    runs: Sequence[Path],
    out: Path,
    steps: Sequence[int] = (),
    reload_seconds: int | None = None,
) -> None:
    """The whole report; nothing is written before all of it has been made.

    Args:
        runs: Folders or files.
        out: Folder to write.
        steps: As the option of the command.
        reload_seconds: How often the page is to load itself again, if at all.
    """
    # Here, since drawing and statistics would slow down the start of every other command.
    from dlmi.report import figures, gradient_sets, tables
    from dlmi.report.claims.table import claims_table
    from dlmi.report.loading import load
    from dlmi.report.page import write_page
    from dlmi.report.writing import write_figures, write_tables, write_text

    data = load(runs, steps)
    drawings = [
        *figures.draw_bars(data),
        *figures.draw_anytime(data, "step"),
        *figures.draw_anytime(data, "token_passes"),
        *figures.draw_temperature(data),
        *figures.draw_violins(data.gradients),
    ]
    made = [
        tables.group_table(data),
        tables.summary_table(data),
        claims_table(data),
        tables.lcs_matrix_table(data),
        tables.overlap_table(data),
        tables.round_trip_table(data),
        gradient_sets.ks_table(data.gradients),
        tables.prompt_table(data),
        *tables.settings_tables(data),
    ]
    shown = [table for table in made if table.rows]
    out.mkdir(parents=True, exist_ok=True)
    write_figures(out / "figures", drawings)
    write_tables(out / "tables", shown)
    write_text(out / TEXT, data, drawings, shown)
    write_page(out / PAGE, data, drawings, shown, reload_seconds)


def _watch(runs: Sequence[Path], out: Path, steps: Sequence[int]) -> None:
    """Write the report whenever its files have grown, and once more at the end."""
    seen = None
    try:
        while True:
            started = time.monotonic()
            if (sizes := _sizes(runs)) != seen:
                seen = sizes
                try:
                    write_report(runs, out, steps, reload_seconds=_LOOK_SECONDS)
                    print(f"{time.strftime('%H:%M:%S')} {out / PAGE}", flush=True)
                except InputError as error:  # no rows yet
                    print(f"waiting for rows: {error}", flush=True)
            # The runs need the processor more than this does.
            time.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - started)))
    except KeyboardInterrupt:
        write_report(runs, out, steps)


def _sizes(runs: Sequence[Path]) -> dict[Path, int]:
    """How large the files of rows are; ranks merge theirs, so one may vanish at any time."""
    sizes = {}
    for run in runs:
        for file in [run] if run.is_file() else run.rglob("*.jsonl"):
            with contextlib.suppress(OSError):
                sizes[file] = file.stat().st_size
    return sizes


def check_new_folder(out: Path) -> None:
    """Raise `InputError` unless a folder can be filled without overwriting anything."""
    if os.path.lexists(out) and not out.is_dir():
        raise InputError(f"Expected `--out` to be a folder, but {out} is a file.")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"Expected `--out` to be a new or empty folder, but {out} is not empty.")
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise InputError(f"Expected `--out` to be in a folder, but {existing} is a file.")
