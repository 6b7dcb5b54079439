"""`python -m dlmi targets`: write targets to a file."""

import statistics
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from dlmi.cli.output import check_new_file, print_table
from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError
from dlmi.lm.placement import default_device
from dlmi.run.data import TargetDataModule
from dlmi.targets.by_rank import describe_target
from dlmi.targets.files import write_targets
from dlmi.targets.sources import ByRank, File, Texts
from dlmi.targets.target import Target


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser.of("targets", write, "--out FILE [options]", {"generated", "options"})
    parser.add_class_arguments(ByRank)
    run_only = {"batch_size", "rows_per_pass", "compile", "targets", "share"}
    parser.add_class_arguments(TargetDataModule, skip=run_only)
    return parser


def targets_command(arguments: list[str]) -> int:
    """Write targets; returns the exit code."""
    options = make_parser().read(arguments)
    own = {name: options.pop(name) for name in ("out", "texts", "file")}
    generated = ByRank(**{field.name: options.pop(field.name) for field in fields(ByRank)})
    return write(generated, options, **own)


def write(
    generated: ByRank,
    options: dict[str, Any],
    *,
    out: Path,
    texts: list[str | dict[str, Any]] | None = None,
    file: str | None = None,
) -> int:
    """Write targets with their ranks, probabilities and perplexity to a JSONL file.

    Args:
        generated: Written unless there are `texts` or a `file`.
        options: Of the data module.
        out: File to write; must not exist.
        texts: Texts to write instead of generated targets.
        file: A file to read instead, as of `fit`'s `data.targets` File.
    """
    check_new_file(out)
    if texts is not None and file is not None:
        raise InputError("Expected `--texts` or `--file`, but got both.")
    source = generated if texts is None else Texts(texts)
    data = TargetDataModule(**options, targets=source if file is None else File(file))
    data.load(default_device())
    made = [describe_target(data.lm, target) for target in data.targets]
    write_targets(out, made)
    columns = ("k", "targets", "tokens", "geometric mean perplexity")
    print_table("", columns, _rows(made))
    print(f"{len(made)} targets of {data.lm.name} in {out}")
    return 0


def _rows(targets: list[Target]) -> Iterator[tuple[object, ...]]:
    """The cells of the table, a row for each k."""
    for k in sorted({t.k for t in targets}, key=lambda k: (k is None, k)):
        group = [t for t in targets if t.k == k]
        values = [t.perplexity for t in group if t.perplexity is not None]
        mean = f"{statistics.geometric_mean(values):.1f}" if values else "-"
        yield "-" if k is None else k, len(group), sum(len(t.ids) for t in group), mean
