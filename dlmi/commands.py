"""The commands beside `fit`: writing targets, and decoding found prompts again."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dlmi.data import TargetDataModule
from dlmi.display import visible
from dlmi.errors import InputError
from dlmi.evaluation import mean_lcs, pasted_lcs, read_alone
from dlmi.lm import FrozenLM
from dlmi.models import load_lm
from dlmi.placement import DeviceMap, split_dtype_name
from dlmi.results import Inversion, read_rows
from dlmi.targets import Target, describe_target, write_targets
from dlmi.transfer import add_transfer_arguments, report_transfer


class CommandParser(ArgumentParser):
    """Errors as `InputError`, so that they end like all others."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """As the base class, but for `null`, which that takes for a value of any type."""
        config: Namespace = super().parse_args(*args, **kwargs)
        for name, default in self.get_defaults().items():
            if default is not None and config.get(name) is None:
                raise InputError(f"Expected `{name}` to have a value, but got null. Leave it out.")
        return config

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise it."""
        raise InputError(message)


def check_new_file(out: Path) -> None:
    """Raise `InputError` unless `--out` can be written without overwriting anything."""
    if os.path.lexists(out):  # a link that leads nowhere too
        raise InputError(f"Expected `--out` to be a new file, but {out} exists.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"Expected `--out` to be in an existing folder, but got {out}.")


def targets_command(arguments: list[str]) -> int:
    """`python -m dlmi targets --out FILE`: the options are those of `fit`'s `data`."""
    parser = CommandParser(
        prog="python -m dlmi targets",
        usage="python -m dlmi targets --out FILE [options]",
        description="Write targets with their ranks, probabilities and perplexity to a JSONL file.",
    )
    parser.add_argument("--out", type=Path, required=True, help="File to write; must not exist.")
    parser.add_class_arguments(TargetDataModule, skip={"batch_size", "rows_per_pass", "compile"})
    config = parser.parse_args(arguments)
    out: Path = config.out
    check_new_file(out)
    options = {name: value for name, value in config.as_dict().items() if name != "out"}
    data = TargetDataModule(**options)
    data.load(default_device())
    targets = [describe_target(data.lm, target) for target in data.targets]
    write_targets(out, targets)
    Console().print(_targets_table(targets))
    print(f"{len(targets)} targets of {data.lm.name} in {out}")
    return 0


def verify_command(arguments: list[str]) -> int:
    """`python -m dlmi verify RESULTS`: exit code 1 where a recorded value does not hold.

    With `--lm` or `--dtype` it asks instead how the prompts do elsewhere, which nothing promises.
    """
    parser = CommandParser(
        prog="python -m dlmi verify",
        usage="python -m dlmi verify RESULTS [options]",
        description=(
            "Load the LM and decode every prompt of a results.jsonl again, one at a time, from "
            "its ids and from its text. With --lm or --dtype: do the prompts work there, too?"
        ),
    )
    parser.add_argument("results", type=Path, help="A results.jsonl, or the run folder with it.")
    parser.add_argument(
        "--lm_device_map", type=DeviceMap | None, default=None, help="As in `fit`'s `data`."
    )
    parser.add_argument("--bos", type=str | int | None, default=None, help="As in `fit`.")
    add_transfer_arguments(parser)
    config = parser.parse_args(arguments)
    rows = read_rows(config.results)
    if not rows:
        raise InputError(f"Expected RESULTS to hold result rows, but {config.results} is empty.")
    if config.lm or config.dtype:
        if config.out is not None:
            check_new_file(config.out)
        return report_transfer(rows, config, default_device())
    if config.out is not None or config.as_text:
        raise InputError("Expected `--lm` or `--dtype` with `--out` or `--as_text`, but got none.")
    lms: dict[tuple[str, str], FrozenLM] = {}
    failures: list[str] = []
    exact_ids = exact_text = 0
    for row in track(rows, "decoding", console=Console(stderr=True), disable=not _is_terminal()):
        key = row.model, row.dtype
        if key not in lms:
            dtype, bits = split_dtype_name(row.dtype)
            lms[key] = load_lm(
                row.model,
                dtype,
                default_device(),
                config.bos,
                lm_device_map=config.lm_device_map,
                quantization=bits,
            )
        problems, from_ids, from_text = _verify_row(lms[key], row)
        failures += [f"{row.target_id}: {problem}" for problem in problems]
        exact_ids += from_ids
        exact_text += from_text
    table = Table(title=f"{len(rows)} prompts decoded again, one at a time", title_justify="left")
    for column in ("", "recorded", "now"):
        table.add_column(column, justify="right")
    table.add_row("exact from ids", str(sum(r.exact for r in rows)), str(exact_ids))
    table.add_row("exact from text", str(sum(r.round_trip_lcs == 1 for r in rows)), str(exact_text))
    Console().print(table)
    for failure in failures:
        print(visible(failure))
    print(f"{len(rows)} rows, {len(failures)} recorded values do not hold")
    return 1 if failures else 0


def _verify_row(lm: FrozenLM, row: Inversion) -> tuple[list[str], bool, bool]:
    """What does not hold, and whether the prompt is exact from ids and from text."""
    if not row.prompt_ids or not row.target_ids:
        return ["prompt or target is empty"], False, False
    target = row.target
    readings = [*target.readings, *(example.example for example in row.held_out)]
    everything = target.with_examples(readings)
    if not all(example.ids for example in readings):
        return ["the target of an example is empty"], False, False
    fixed_ids = [i for example in readings for i in example.frame.given_ids]
    ids = [*row.prompt_ids, *row.target_ids, *everything.ids, *fixed_ids]
    lm.check_ids(ids, f"row {row.target_id}")
    prompt_bos = bool(row.settings.get("prompt_bos", False))
    length = prompt_bos + everything.longest_row(len(row.prompt_ids))
    if lm.max_positions is not None and length > lm.max_positions:
        return [f"{length} tokens are more than {lm.name} has positions"], False, False
    said, _, written = read_alone(lm, row.prompt_ids, everything, prompt_bos)
    output_ids = said[: len(target.ids)]
    now_text_lcs = pasted_lcs(lm, row.prompt_ids, target, prompt_bos)
    is_exact = output_ids == row.target_ids
    recorded_and_now: dict[str, tuple[Any, Any]] = {
        "output_ids": (row.output_ids, output_ids),
        "lcs": (row.lcs, mean_lcs(target, output_ids)),
        "exact": (row.exact, is_exact),
        "prompt_text": (row.prompt_text, lm.decode(row.prompt_ids)),
        "round_trip_lcs": (row.round_trip_lcs, now_text_lcs),
    }
    if row.frame is not None:
        full_ids = row.frame.full_ids(row.prompt_ids)
        recorded_and_now["full_ids"] = row.full_ids, full_ids
        recorded_and_now["full_text"] = row.full_text, lm.decode(full_ids)
    recorded_examples = [*row.examples, *row.held_out]
    written = written or ((),) * len(readings)
    last = -len(recorded_examples)
    for example, said_ids, before in zip(
        recorded_examples, everything.split(said)[last:], written[last:], strict=False
    ):
        full_text = lm.decode(example.frame.full_ids(row.prompt_ids))
        recorded_and_now[f"example {example.id}"] = (
            (example.full_text, example.reasoning_ids, example.output_ids, example.exact),
            (full_text, before, said_ids, said_ids == example.ids),
        )
    problems = [
        f"{name} is recorded as {recorded!r} but is {value!r}"
        for name, (recorded, value) in recorded_and_now.items()
        if recorded != value
    ]
    return problems, is_exact, now_text_lcs == 1


def _targets_table(targets: list[Target]) -> Table:
    table = Table("k", "targets", "tokens", "geometric mean perplexity")
    for k in sorted({t.k for t in targets}, key=lambda k: (k is None, k)):
        group = [t for t in targets if t.k == k]
        perplexities = torch.tensor([t.perplexity for t in group if t.perplexity is not None])
        table.add_row(
            "-" if k is None else str(k),
            str(len(group)),
            str(sum(len(t.ids) for t in group)),
            f"{float(perplexities.log().mean().exp()):.1f}" if len(perplexities) else "-",
        )
    return table


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return torch.device("cpu") if accelerator is None else accelerator


def _is_terminal() -> bool:
    return sys.stderr.isatty()
