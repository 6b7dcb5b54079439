"""`python -m dlmi targets`: write targets to a file."""

from dataclasses import fields
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dlmi.cli.parser import CommandParser, check_new_file, default_device
from dlmi.errors import InputError
from dlmi.run.data import TargetDataModule
from dlmi.targets.by_rank import describe_target
from dlmi.targets.files import write_targets
from dlmi.targets.sources import ByRank, File, TargetSource, Texts
from dlmi.targets.target import Target


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m dlmi targets",
        usage="python -m dlmi targets --out FILE [options]",
        description="Write targets with their ranks, probabilities and perplexity to a JSONL file.",
    )
    parser.add_argument("--out", type=Path, required=True, help="File to write; must not exist.")
    parser.add_class_arguments(ByRank)
    parser.add_argument(
        "--texts", type=list[str] | None, default=None, help="In place of generated ones: texts."
    )
    parser.add_argument(
        "--file",
        type=str | None,
        default=None,
        help="In place of generated ones: those of a file, as of `fit`'s `data.targets` File.",
    )
    run_only = {"batch_size", "rows_per_pass", "compile", "targets", "share"}
    parser.add_class_arguments(TargetDataModule, skip=run_only)
    return parser


def targets_command(arguments: list[str]) -> int:
    """Generate targets, or take those of a file or of texts, and write them with their ranks."""
    parser = make_parser()
    config = parser.parse_args(arguments)
    out: Path = config.out
    check_new_file(out)
    source: TargetSource
    if config.texts is not None and config.file is not None:
        raise InputError("Expected `--texts` or `--file`, but got both.")
    if config.texts is not None:
        source = Texts(config.texts)
    elif config.file is not None:
        source = File(config.file)
    else:
        source = ByRank(**{field.name: config[field.name] for field in fields(ByRank)})
    made = parser.instantiate_classes(config)
    options = {name: made[name] for name in ("lm", "dtype", "load", "template", "chat")}
    data = TargetDataModule(**options, targets=source)
    data.load(default_device())
    targets = [describe_target(data.lm, target) for target in data.targets]
    write_targets(out, targets)
    Console().print(_table(targets))
    print(f"{len(targets)} targets of {data.lm.name} in {out}")
    return 0


def _table(targets: list[Target]) -> Table:
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
