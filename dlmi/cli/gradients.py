"""`python -m dlmi gradients`: measure estimators along runs, print a table, write the rows."""

import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table

from dlmi.cli.parser import CommandParser, default_device
from dlmi.errors import InputError
from dlmi.gradient_rows import (
    FILE_NAME,
    STATISTICS,
    GradientRow,
    Statistic,
    read_gradient_rows,
    refuse_used_file,
)
from dlmi.gradients.callback import GradientStudy
from dlmi.gradients.estimators import ESTIMATORS, Estimator, label
from dlmi.report.gradient_comparison import ks_tests, labels_of, median_statistic
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.scoring.losses import LossName
from dlmi.text import visible

_TESTED = ("variance_max", "bias_max", "relative_variance", "bias_over_norm")


@dataclass(frozen=True)
class TrajectoryRun:
    """The optimisation along which it is measured.

    Attributes:
        prompt_length: Tokens of a prompt, N.
        steps: Optimisation steps of a target; the state after the last one is not measured.
        num_samples: Samples per step, and so per draw, S.
        teacher_forcing: Feed the target's own prefix; else run freely, as in the paper's figure.
        loss: `cross_entropy`, `margin` or `hinge`.
        lr: Adam's learning rate.
        prompt_bos: Put BoS before the prompt.
        phi_init: Start of learned temperatures: `normal`, `uniform` (the authors' code) or `zero`.
    """

    prompt_length: int = 80
    steps: int = 256
    num_samples: int = 8
    teacher_forcing: bool = False
    loss: LossName = "cross_entropy"
    lr: float = 0.1
    prompt_bos: bool = False
    phi_init: Literal["normal", "uniform", "zero"] = "normal"

    def inverter(self, estimator: Estimator, seed: int) -> Inverter:
        """A run that descends by an estimator."""
        names = {field.name for field in fields(estimator)}
        own = {name: value for name, value in asdict(self).items() if name in names}
        return Inverter(
            replace(estimator, **own),
            prompt_length=self.prompt_length,
            steps=self.steps,
            eval_every=self.steps,
            prompt_bos=self.prompt_bos,
            seed=seed,
        )


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m dlmi gradients",
        usage="python -m dlmi gradients --config FILE [options]",
        description=(
            "Bias and variance of gradient estimators with respect to Z, against the true "
            "gradient of the expected loss of hard prompts, along optimisation runs. One JSON line "
            f"per estimator, target, seed and step goes to {FILE_NAME} in the folder `--out`."
        ),
    )
    parser.add_argument("-c", "--config", action="config", help="A configuration file, YAML.")
    parser.add_argument(
        "--trajectory",
        choices=["own", *ESTIMATORS],
        default="own",
        help=(
            "Whose run gives the states: `own` measures each estimator along its own (as in the "
            "paper), the name of an estimator measures all of them at the states of its run."
        ),
    )
    parser.add_argument("--seeds", type=list[int], default=[0], help="Of the runs, one each.")
    parser.add_argument(
        "--out", type=Path, default=Path("gradients"), help="Folder for the rows; made if need be."
    )
    parser.add_class_arguments(TrajectoryRun, "run")
    parser.add_class_arguments(GradientStudy, "study")
    parser.add_class_arguments(TargetDataModule, "data")
    return parser


def gradients_command(arguments: list[str]) -> int:
    """Run, measure, print and write."""
    parser = make_parser()
    config = parser.parse_args(arguments)
    try:
        rows = _measure(parser, config)
    except InputError as error:  # methods and runs name their own sections
        message = str(error).replace("`model.method.", "`run.").replace("`model.", "`run.")
        raise InputError(message) from error
    screen = Console()
    screen.print(_medians_table(rows), _tests_table(rows))
    print(f"{len(rows)} rows in {config.out / FILE_NAME}")
    return 0


def _measure(parser: CommandParser, config: Namespace) -> list[GradientRow]:
    path: Path = config.out / FILE_NAME
    refuse_used_file(path)
    if config.out.exists() and not config.out.is_dir():
        raise InputError(f"Expected `--out` to be a folder, but {config.out} is a file.")
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise InputError(f"Expected `--seeds` to be different numbers, but got {config.seeds}.")
    made = parser.instantiate_classes(config)
    run: TrajectoryRun = made.run
    data: TargetDataModule = made.data
    leader, names = config.trajectory, config.study.estimators
    parts = [(name, [name]) for name in names] if leader == "own" else [(leader, names)]
    for first, _ in parts:
        run.inverter(ESTIMATORS[first], config.seeds[0])  # checks, before the LM is loaded
    data.load(default_device())
    started = time.monotonic()
    for first, measured in parts:
        study = GradientStudy(**{**config.study.as_dict(), "estimators": measured})
        study.path = path
        study.trajectory = "own" if leader == "own" else label(ESTIMATORS[first])
        study.notify = lambda row: _print_row(row, time.monotonic() - started)
        for seed in config.seeds:
            _follow(run.inverter(ESTIMATORS[first], seed), data, study, config.out)
    return read_gradient_rows(path)[0]


def _follow(inverter: Inverter, data: TargetDataModule, study: GradientStudy, folder: Path) -> None:
    trainer = Trainer(
        max_epochs=-1,
        callbacks=[study],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(inverter, datamodule=data)
    except SystemExit:  # Lightning's answer to Ctrl-C
        if trainer.interrupted:
            raise KeyboardInterrupt from None
        raise


def _print_row(row: GradientRow, seconds: float) -> None:
    names = ("variance_max", "bias_max", "snr", "cosine")
    cells = (f"{name} {_cell(getattr(row, name))}" for name in names)
    place = f"{visible(row.target_id)} seed {row.seed} step {row.step}"
    print(f"{seconds:6.0f} s  {place}  {row.estimator}: {', '.join(cells)}", flush=True)


def _medians_table(rows: list[GradientRow]) -> Table:
    kinds = sorted({row.truth["kind"] for row in rows if row.truth is not None})
    truth = f"truth: {', '.join(kinds)}" if kinds else "no truth was due"
    table = Table(
        title=f"Medians over rows, with the ends of a typical row's 95% interval ({truth})",
        title_justify="left",
    )
    for name in ("estimator", "rows", *STATISTICS):
        table.add_column(name, justify="left" if name == "estimator" else "right")
    for estimator in labels_of(rows):
        count = sum(row.estimator == estimator for row in rows)
        medians = (median_statistic(rows, estimator, name)[0] for name in STATISTICS)
        table.add_row(estimator, str(count), *map(_cell, medians))
    return table


def _tests_table(rows: list[GradientRow]) -> Table:
    table = Table(
        title="Kolmogorov-Smirnov distance D of each pair, and p (two-sided, Holm-corrected)",
        title_justify="left",
    )
    for name in ("estimators", *_TESTED):
        table.add_column(name, justify="left" if name == "estimators" else "right")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for test in ks_tests(rows, _TESTED):
        text = f"{test.distance:.2f}  p {test.adjusted_p_value:.2g}"
        cells.setdefault((test.first, test.second), {})[test.statistic_name] = text
    for (first, second), by_name in cells.items():
        table.add_row(f"{first} | {second}", *(by_name.get(name, "-") for name in _TESTED))
    return table


def _cell(statistic: Statistic) -> str:
    """A number with its interval; `..` for an end that is not bounded.

    >>> _cell(Statistic(0.5, 0.25, None))
    '0.5 [0.25 ..]'
    """
    if statistic.value is None:
        return "-"
    low, high = (".." if end is None else f"{end:.2g}" for end in (statistic.low, statistic.high))
    return f"{statistic.value:.2g} [{low} {high}]"
