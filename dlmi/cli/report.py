"""`python -m dlmi report RUNS... --out DIR`: figures, tables and one page from result files."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from dlmi.cli.output import check_writable
from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError

PAGE = "report.html"
TEXT = "report.md"

_LOOK_SECONDS = 10  # between two checks for new rows


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser.of("report", report, "RUNS... --out DIR [options]", {"runs", "watch"})
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="Folders with a results.jsonl or a gradients.jsonl somewhere below, or such files.",
    )
    parser.add_argument(  # takes no value, so that RUNS may follow
        "--watch",
        action="store_true",
        help="Write everything again as rows come, until Ctrl-C; the page reloads itself.",
    )
    return parser


def report(
    runs: list[Path], *, out: Path, steps: list[int] | None = None, watch: bool = False
) -> int:
    """Turn runs into figures (PNG, PDF, SVG), tables (Markdown, CSV, LaTeX) and one HTML page.

    No LM is loaded. Runs of different LMs or target sets are shown apart.

    Args:
        runs: Folders or files.
        out: Folder to write; must be new or empty.
        steps: Steps at which runs are compared, such as [256,2048]. Default: those of the
            comparison, else the end of the run.
        watch: Whether to write again as rows come.
    """
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"Expected `--out` to be a new or empty folder, but {out} is not empty.")
    check_writable(out, "--out")
    if min(steps or [1]) < 1:
        raise InputError(f"Expected `--steps` to be positive numbers, but got {steps}.")
    (_watch if watch else write_report)(runs, out, steps or ())
    print(f"report in {out}: open {out / PAGE} or {out / TEXT}")
    return 0


def write_report(
    runs: Sequence[Path], out: Path, steps: Sequence[int] = (), reload_seconds: int | None = None
) -> None:
    """Write the whole report, or nothing; the page reloads itself after `reload_seconds`."""
    # Imported here, since matplotlib and scipy slow down `--help`.
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
    """Write the report whenever a file of rows has changed, and once more after Ctrl-C."""
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
            # Take at most a sixth of the time: the runs need the processor.
            time.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - started)))
    except KeyboardInterrupt:
        write_report(runs, out, steps)


def _sizes(runs: Sequence[Path]) -> dict[Path, int]:
    """The sizes of the files of rows; one may vanish at any time, when workers merge theirs."""
    sizes = {}
    for run in runs:
        for file in [run] if run.is_file() else run.rglob("*.jsonl"):
            with contextlib.suppress(OSError):
                sizes[file] = file.stat().st_size
    return sizes
