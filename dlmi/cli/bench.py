"""`python -m dlmi bench`: three small tables and a JSON file."""

import dataclasses
import json
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dlmi.bench.searches import SEARCHES, SearchTimes, time_search
from dlmi.bench.steps import SHAPES, StepTimes, random_ids, time_steps
from dlmi.bench.textbook import TextbookProcess
from dlmi.bench.timing import matmul_flops
from dlmi.cli.parser import CommandParser, check_new_file, default_device
from dlmi.errors import InputError
from dlmi.lm.loading import PACKAGED, load_lm
from dlmi.lm.placement import DType
from dlmi.run.identity import describe_environment
from dlmi.text import visible

_LEGEND = """\
Steps of DLMI on one target: N prompt tokens, M target tokens, S samples.
floor: what nobody can leave out, the LM's forward and backward pass and the two
products with the embedding matrix.
textbook: the method as a plain script has it, in a process of its own.
"""


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m dlmi bench",
        usage="python -m dlmi bench [options]",
        description=(
            "Time an optimisation step against its floor (the LM's own passes and the two "
            "products with E) and against a textbook implementation, in turn, in one run; and a "
            "search, alone and with others. Run it on a machine that does nothing else."
        ),
    )
    parser.add_argument("--lm", type=str, default=PACKAGED, help="As in `fit`.")
    parser.add_argument("--dtype", type=DType, default="auto", help="As in `fit`.")
    parser.add_argument("--repeats", type=int, default=7, help="Timed steps; medians are shown.")
    parser.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="File to write; must not exist."
    )
    return parser


def bench_command(arguments: list[str]) -> int:
    """Measure, print and write."""
    config = make_parser().parse_args(arguments)
    if config.repeats < 1:
        raise InputError(f"Expected `--repeats` to be at least 1, but got {config.repeats}.")
    check_new_file(config.out)
    report = _measure(config)
    config.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"figures in {config.out}")
    return 0


def _measure(config: Any) -> dict[str, Any]:
    screen, notes = Console(), Console(stderr=True)
    lm = load_lm(config.lm, config.dtype, default_device())
    flops, threads = matmul_flops(lm.device, lm.dtype), torch.get_num_threads()
    machine = (
        f"{lm.name}, {lm.dtype}, {lm.device}, {threads} threads, "
        f"matrix product {flops / 1e9:.0f} Gflop/s"
    )
    screen.print(visible(machine), markup=False)
    times = []
    with (
        notes.status("") as status,
        TextbookProcess(config.lm, config.dtype, lm.device, threads) as textbook,
    ):
        for shape in SHAPES:
            status.update("steps at N={}, M={}, S={}".format(*shape))
            times.append(time_steps(lm, textbook, shape, config.repeats, flops))
        searches = []
        for length, target_length, slots in SEARCHES:
            status.update(f"search with {slots} slots")
            ids = random_ids(lm, slots, target_length).tolist()
            searches.append(time_search(lm, ids, length, config.repeats))
    screen.print(_LEGEND, _time_table(times), _memory_table(times), markup=False)
    screen.print(_search_table(searches))
    return {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "matmul_gflops": flops / 1e9,
        **describe_environment(lm),
        "steps": [{**dataclasses.asdict(line), **line.ratios()} for line in times],
        "searches": [dataclasses.asdict(line) for line in searches],
    }


def _time_table(times: list[StepTimes]) -> Table:
    columns = ("this tool", "floor", "textbook", "step / floor", "textbook / step")
    table = _table("Seconds of a step, medians", "N", "M", "S", *columns)
    for line in times:
        ratios = line.ratios()
        seconds = (line.seconds, line.floor_seconds, line.textbook_seconds)
        table.add_row(
            *_sizes(line),
            *(f"{value:.3g}" for value in seconds),
            f"{ratios['step / floor']:.2f}",
            f"{ratios['textbook / step']:.2f}",
        )
    return table


def _memory_table(times: list[StepTimes]) -> Table:
    columns = ("this tool", "LM's pass", "textbook", "token-passes/s", "of matmul speed")
    table = _table("Peak memory of a step in MB, and speed of this tool", "N", "M", "S", *columns)
    for line in times:
        peaks = (line.peak_bytes, line.floor_peak_bytes, line.textbook_peak_bytes)
        table.add_row(
            *_sizes(line),
            *(f"{peak / 1e6:.0f}" for peak in peaks),
            f"{line.token_passes_per_second:.0f}",
            f"{line.matmul_share:.0%}",
        )
    return table


def _search_table(times: list[SearchTimes]) -> Table:
    columns = ("N", "M", "slots", "seconds", "token-passes", "microseconds each")
    table = _table("Steps of SwapSearch, medians; all slots together", *columns)
    for line in times:
        table.add_row(
            str(line.prompt_length),
            str(line.target_length),
            str(line.slots),
            f"{line.seconds:.3g}",
            f"{line.token_passes:.0f}",
            f"{line.microseconds_per_token_pass:.0f}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _sizes(line: StepTimes) -> tuple[str, str, str]:
    return str(line.prompt_length), str(line.target_length), str(line.samples)
