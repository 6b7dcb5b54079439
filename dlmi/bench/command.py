"""`python -m dlmi bench`: one table and a JSON file."""

import dataclasses
import json
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from dlmi.bench.calibration import calibrate
from dlmi.bench.cost_model import CostModel, Machine
from dlmi.bench.lm_sizes import Sizes
from dlmi.bench.prediction import Prediction, compare_with_clock
from dlmi.bench.refill import RefillTimes, time_refill
from dlmi.bench.scaling import Growth, measure_growth
from dlmi.bench.steps import SHAPES, StepTimes, time_steps
from dlmi.bench.textbook import TextbookProcess
from dlmi.bench.timing import matmul_flops
from dlmi.commands import CommandParser, check_new_file, default_device
from dlmi.display import visible
from dlmi.errors import InputError
from dlmi.models import PACKAGED, load_lm
from dlmi.placement import DType
from dlmi.results import describe_environment

Part = Literal["steps", "refill", "scaling", "model"]


def bench_command(arguments: list[str]) -> int:
    """Measure, print and write."""
    parser = CommandParser(
        prog="python -m dlmi bench",
        usage="python -m dlmi bench [options]",
        description=(
            "Time an optimisation step against its floor (the LM's own passes and the two "
            "products with E) and against a textbook implementation, in turn, in one run. Run it "
            "on a machine that does nothing else."
        ),
    )
    parser.add_argument("--lm", type=str, default=PACKAGED, help="As in `fit`.")
    parser.add_argument("--dtype", type=DType, default="auto", help="As in `fit`.")
    parser.add_argument(
        "--parts",
        type=list[Part],
        default=["steps", "refill", "scaling"],
        help="What to measure; `model` checks the cost model of docs/scaling.md on this machine.",
    )
    parser.add_argument("--repeats", type=int, default=7, help="Timed steps; medians are shown.")
    parser.add_argument(
        "--compile",
        type=bool,
        default=False,
        help="Time steps with a compiled LM as well; compiling takes minutes.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="File to write; must not exist."
    )
    config = parser.parse_args(arguments)
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
    flops = matmul_flops(lm.device, lm.dtype)
    machine = (
        f"{lm.name}, {lm.dtype}, {lm.device}, {torch.get_num_threads()} threads, "
        f"matrix product {flops / 1e9:.0f} Gflop/s"
    )
    screen.print(visible(machine), markup=False)
    report: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "matmul_gflops": flops / 1e9,
        **describe_environment(lm),
    }
    with notes.status("") as status:
        if "steps" in config.parts:
            lines = []
            threads = torch.get_num_threads()
            with TextbookProcess(config.lm, config.dtype, lm.device, threads) as textbook:
                for shape in SHAPES:
                    status.update("steps at N={}, M={}, S={}".format(*shape))
                    lines.append(
                        time_steps(lm, textbook, shape, config.repeats, flops, config.compile)
                    )
            screen.print(_steps_table(lines), _memory_table(lines))
            report["steps"] = [{**dataclasses.asdict(x), **x.ratios()} for x in lines]
        if "refill" in config.parts:
            status.update("refill against static batches")
            refill = time_refill(lm)
            screen.print(_refill_table(refill))
            report["refill"] = {**dataclasses.asdict(refill), **refill.ratios()}
        if "scaling" in config.parts:
            growths = []
            status.update("growth with N, M, S, V and slots")
            for growth in measure_growth(lm, max(1, config.repeats // 2)):
                growths.append(growth)
                status.update(f"growth: {growth.name} done")
            screen.print(_growth_table(growths))
            report["scaling"] = [dataclasses.asdict(growth) for growth in growths]
        if "model" in config.parts:
            status.update("speed of this machine's parts")
            sizes = Sizes.of(lm.model)
            costs = CostModel(sizes, calibrate(sizes, lm.device, lm.dtype))
            status.update("steps and a run, to be compared with the cost model")
            predictions = list(compare_with_clock(lm, costs, config.repeats))
            screen.print(_machine_table(costs.machine), _prediction_table(predictions))
            report["machine_speed"] = dataclasses.asdict(costs.machine)
            report["predictions"] = [
                {**dataclasses.asdict(p), "ratios": p.ratios()} for p in predictions
            ]
    return report


def _steps_table(lines: list[StepTimes]) -> Table:
    table = _table("Seconds of an optimisation step", "N", "M", "S", "this tool", "floor")
    for column in ("textbook", "step / floor", "textbook / step"):
        table.add_column(column, justify="right")
    has_compiled = any(line.compiled_seconds is not None for line in lines)
    if has_compiled:
        table.add_column("compiled", justify="right")
        table.add_column("compiled / floor", justify="right")
    for line in lines:
        ratios = line.ratios()
        sizes = (line.prompt_length, line.target_length, line.samples)
        cells = [
            *map(str, sizes),
            f"{line.seconds:.2f}",
            f"{line.floor_seconds:.2f}",
            f"{line.textbook_seconds:.2f}",
            f"{ratios['step / floor']:.3f}",
            f"{ratios['textbook / step']:.2f}",
        ]
        if line.compiled_seconds is not None:
            cells += [f"{line.compiled_seconds:.2f}", f"{ratios['compiled step / floor']:.3f}"]
        table.add_row(*cells)
    return table


def _memory_table(lines: list[StepTimes]) -> Table:
    table = _table("Peak memory in MB, and throughput", "N", "M", "S", "this tool", "LM's pass")
    for column in ("textbook", "steps/s", "token passes/s", "of matmul speed"):
        table.add_column(column, justify="right")
    for line in lines:
        sizes = (line.prompt_length, line.target_length, line.samples)
        table.add_row(
            *map(str, sizes),
            f"{line.peak_bytes / 1e6:.0f}",
            f"{line.floor_peak_bytes / 1e6:.0f}",
            f"{line.textbook_peak_bytes / 1e6:.0f}",
            f"{1 / line.seconds:.2f}",
            f"{line.token_passes_per_second:.0f}",
            f"{line.matmul_share:.0%}",
        )
    return table


def _refill_table(times: RefillTimes) -> Table:
    title = f"{times.targets} targets of unequal length through {times.slots} slots"
    table = _table(title, "", "seconds", "targets per hour")
    for name, seconds in (
        ("refilled at once", times.refill_seconds),
        ("static batches", times.static_seconds),
    ):
        table.add_row(name, f"{seconds:.1f}", f"{3600 * times.targets / seconds:.0f}")
    table.add_row("ratio", f"{times.ratios()['refill / static']:.2f}", "")
    return table


def _growth_table(growths: list[Growth]) -> Table:
    table = _table("Seconds of a step = a size^b", "size", "values", "seconds", "b")
    for growth in growths:
        table.add_row(
            growth.name,
            " ".join(map(str, growth.sizes)),
            " ".join(f"{s:.2f}" for s in growth.seconds),
            f"{growth.exponent:.2f}",
        )
    return table


def _machine_table(machine: Machine) -> Table:
    table = _table("Speed of this machine's parts", "", "")
    for name, value, unit in (
        ("products of the LM's shapes", machine.flops / 1e9, "Gflop/s"),
        ("products in float32", machine.flops_float32 / 1e9, "Gflop/s"),
        ("attention", machine.attention_flops / 1e9, "Gflop/s"),
        ("reading weights", machine.weight_bandwidth / 1e9, "GB/s"),
        ("elementwise", machine.bandwidth / 1e9, "GB/s"),
        ("noise and softmax, forward", machine.entry_seconds[0] * 1e9, "ns per entry"),
        ("noise and softmax, backward", machine.entry_seconds[1] * 1e9, "ns per entry"),
        ("a layer, forward", machine.layer_seconds[0] * 1e3, "ms"),
        ("a layer, backward", machine.layer_seconds[1] * 1e3, "ms"),
        ("around a step", machine.step_seconds * 1e3, "ms"),
        ("the same, per slot", machine.slot_seconds * 1e3, "ms"),
    ):
        table.add_row(name, f"{value:.3g} {unit}")
    return table


def _prediction_table(lines: list[Prediction]) -> Table:
    table = _table("Cost model: predicted / measured", "", "N", "M", "S", "slots")
    for column in ("predicted s", "measured s", "ratio", "predicted MB", "measured MB", "ratio"):
        table.add_column(column, justify="right")
    for line in lines:
        ratios, size = line.ratios(), line.size
        cells = [line.what, *map(str, (size.N, size.M, size.S, size.slots))]
        cells += [f"{line.predicted_seconds:.4g}", f"{line.seconds:.4g}"]
        cells.append(f"{ratios['seconds']:.2f}")
        if line.peak_bytes is not None and line.predicted_peak_bytes is not None:
            megabytes = (line.predicted_peak_bytes / 1e6, line.peak_bytes / 1e6)
            cells += [*(f"{value:.1f}" for value in megabytes), f"{ratios['peak']:.2f}"]
        table.add_row(*cells)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
