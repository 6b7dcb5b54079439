"""`python -m dlmi bench`: the speed and memory of steps, as tables and a JSON file."""

import dataclasses
import json
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from dlmi.bench.searches import SEARCHES, SearchTimes, time_search
from dlmi.bench.steps import SHAPES, StepTimes, random_ids, time_steps
from dlmi.bench.textbook import TextbookProcess
from dlmi.bench.timing import matmul_flops
from dlmi.cli.output import check_new_file, table
from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError
from dlmi.lm.loading import PACKAGED, load_lm
from dlmi.lm.pass_dtype import PassDType
from dlmi.lm.placement import DType, default_device
from dlmi.run.identity import describe_environment
from dlmi.text import visible

_LEGEND = """\
Steps of DLMI on one target: N prompt tokens, M target tokens, S samples.
floor: what no implementation can leave out, the LM's forward and backward pass and
the two products with the embedding matrix.
textbook: a plain implementation of the method, in a process of its own.
"""
_SECONDS = ("N", "M", "S", "this tool", "floor", "textbook", "step / floor", "textbook / step")
_MEMORY = ("N", "M", "S", "this tool", "LM's pass", "textbook", "token-passes/s", "of matmul speed")
_SEARCH = (
    *("N", "M", "slots", "passes in", "seconds", "token-passes/s", "of matmul speed"),
    *("evaluation", "gradient", "candidates", "LM calls", "tokens a call"),
)


def make_parser() -> CommandParser:
    """The options."""
    return CommandParser.of("bench", bench)


def bench(
    lm: str = PACKAGED,
    dtype: DType = "auto",
    parts: Literal["all", "steps", "search"] = "all",
    repeats: int = 7,
    token_budget: int = 4000,
    pass_dtype: PassDType | None = None,
    out: Path = Path("bench.json"),
) -> int:
    """Time steps of DLMI, and whole searches. Run it on an idle machine.

    A step is timed against its floor, the LM's own passes and the two products with E, and against
    a textbook implementation; the three take turns. A search is timed with one slot and with eight.

    Args:
        lm: As in `fit`.
        dtype: As in `fit`.
        parts: What is timed.
        repeats: Timed steps; medians are shown.
        token_budget: Token-passes of each target of a search.
        pass_dtype: As in `fit`; for searches.
        out: File to write; must not exist.
    """
    if repeats < 1:
        raise InputError(f"Expected `--repeats` to be at least 1, but got {repeats}.")
    check_new_file(out)
    model = load_lm(lm, dtype, default_device())
    flops, threads = matmul_flops(model.device, model.dtype), torch.get_num_threads()
    screen = Console(markup=False)
    screen.print(
        f"{visible(model.name)}, {model.dtype}, {model.device}, {threads} threads, "
        f"matrix product {flops / 1e9:.0f} Gflop/s"
    )
    steps, searches = [], []
    with Console(stderr=True).status("") as status:
        if parts != "search":
            with TextbookProcess(lm, dtype, model.device, threads) as textbook:
                for shape in SHAPES:
                    status.update("steps at N={}, M={}, S={}".format(*shape))
                    steps.append(time_steps(model, textbook, shape, repeats, flops))
        for length, target_length, slots in SEARCHES if parts != "steps" else ():
            status.update(f"search at N={length}, M={target_length} with {slots} slots")
            ids = random_ids(model, slots, target_length).tolist()
            searches.append(time_search(model, ids, length, token_budget, pass_dtype))
    if steps:
        title = "Peak memory of a step in MB, and speed of this tool"
        screen.print(
            _LEGEND,
            table("Seconds of a step, medians", _SECONDS, map(_seconds, steps)),
            table(title, _MEMORY, map(_memory, steps)),
        )
    if searches:
        title = f"SwapSearch, {token_budget} token-passes a target; a step is one of all slots"
        screen.print(table(title, _SEARCH, map(_search, searches)))
    report = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "matmul_gflops": flops / 1e9,
        **describe_environment(model),
        "steps": [{**dataclasses.asdict(line), **line.ratios()} for line in steps],
        "searches": [dataclasses.asdict(line) for line in searches],
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"figures in {out}")
    return 0


def _seconds(line: StepTimes) -> list[object]:
    times = line.seconds, line.floor_seconds, line.textbook_seconds
    ratios = line.ratios()["step / floor"], line.ratios()["textbook / step"]
    cells = *(f"{t:.3g}" for t in times), *(f"{r:.2f}" for r in ratios)
    return [line.prompt_length, line.target_length, line.samples, *cells]


def _memory(line: StepTimes) -> list[object]:
    peaks = line.peak_bytes, line.floor_peak_bytes, line.textbook_peak_bytes
    speed = f"{line.token_passes_per_second:.0f}", f"{line.matmul_share:.0%}"
    cells = *(f"{p / 1e6:.0f}" for p in peaks), *speed
    return [line.prompt_length, line.target_length, line.samples, *cells]


def _search(line: SearchTimes) -> list[object]:
    shares = line.matmul_share, line.evaluation, line.gradient, line.candidates
    return [
        *(line.prompt_length, line.target_length, line.slots, line.pass_dtype),
        *(f"{line.seconds_per_step:.3g}", f"{line.token_passes_per_second:.0f}"),
        *(f"{share:.0%}" for share in shares),
        *(f"{line.calls_per_step:.1f}", f"{line.tokens_per_call:.0f}"),
    ]
