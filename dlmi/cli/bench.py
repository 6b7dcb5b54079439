"""`python -m dlmi bench`: the speed and memory of steps, as tables and a JSON file."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from dlmi.bench.searches import SEARCHES, time_search
from dlmi.bench.steps import SHAPES, random_ids, time_steps
from dlmi.bench.textbook import textbook_process
from dlmi.bench.timing import matmul_flops
from dlmi.cli.output import check_new_file, print_table
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
_OF_MATMUL = "of matmul: share of the speed of a bare matrix product in the same dtype.\n"
# Columns of the tables, and the format of their cells.
_SHAPE = {"N": "{prompt_length}", "M": "{target_length}"}
_SECONDS = _SHAPE | {
    "S": "{samples}",
    "this tool": "{seconds:.3g}",
    "floor": "{floor_seconds:.3g}",
    "textbook": "{textbook_seconds:.3g}",
    "step / floor": "{step / floor:.2f}",
    "textbook / step": "{textbook / step:.2f}",
}
_MEMORY = _SHAPE | {
    "S": "{samples}",
    "this tool": "{peak_bytes:.0f}",
    "LM's pass": "{floor_peak_bytes:.0f}",
    "textbook": "{textbook_peak_bytes:.0f}",
    "token-passes/s": "{token_passes_per_second:.0f}",
    "of matmul": "{matmul_share:.0%}",
}
_SEARCH = _SHAPE | {
    "slots": "{slots}",
    "passes in": "{pass_dtype}",
    "seconds": "{seconds_per_step:.3g}",
    "token-passes/s": "{token_passes_per_second:.0f}",
    "of matmul": "{matmul_share:.0%}",
}
_SHARES = _SHAPE | {
    "slots": "{slots}",
    "evaluation": "{evaluation:.0%}",
    "gradient": "{gradient:.0%}",
    "candidates": "{candidates:.0%}",
    "calls": "{calls_per_step:.1f}",
    "tokens/call": "{tokens_per_call:.0f}",
}


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
    print(
        f"{visible(model.name)}, {model.dtype}, {model.device}, {threads} threads, "
        f"matrix product {flops / 1e9:.0f} Gflop/s"
    )
    steps, searches = [], []
    with Console(stderr=True).status("") as status:
        if parts != "search":
            with textbook_process(lm, dtype, model.device, threads) as textbook:
                for shape in SHAPES:
                    status.update("steps at N={}, M={}, S={}".format(*shape))
                    steps.append(time_steps(model, textbook, shape, repeats, flops))
        for length, target_length, slots in SEARCHES if parts != "steps" else ():
            status.update(f"search at N={length}, M={target_length} with {slots} slots")
            ids = random_ids(model, slots, target_length).tolist()
            searches.append(time_search(model, ids, length, token_budget, pass_dtype))
    if steps:
        in_mb = [
            {name: value / 1e6 if "bytes" in name else value for name, value in line.items()}
            for line in steps
        ]
        print(_LEGEND + _OF_MATMUL)
        _print("Seconds of a step, medians", _SECONDS, steps)
        _print("Peak memory of a step in MB, and speed of this tool", _MEMORY, in_mb)
    if searches:
        title = f"SwapSearch, {token_budget} token-passes a target; a step is one of all slots"
        print(_OF_MATMUL)
        _print(title, _SEARCH, searches)
        _print("Shares of its time, and LM calls of a step", _SHARES, searches)
    report = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "matmul_gflops": flops / 1e9,
        **describe_environment(model),
        "steps": steps,
        "searches": searches,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"figures in {out}")
    return 0


def _print(title: str, columns: Mapping[str, str], lines: Sequence[Mapping[str, Any]]) -> None:
    cells = ([cell.format_map(line) for cell in columns.values()] for line in lines)
    print_table(title, columns, cells)
