"""`python -m dlmi gradients`: bias and variance of gradient estimators along runs."""

import time
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from dlmi.cli.output import check_writable, print_table
from dlmi.cli.parser import CommandParser
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
from dlmi.lm.placement import default_device
from dlmi.report.gradient_sets import ks_tests, median_statistic
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.quiet import run_quietly
from dlmi.scoring.losses import LossName
from dlmi.text import visible

_TESTED = ("variance_max", "bias_max", "relative_variance", "bias_over_norm")


@dataclass(frozen=True)
class TrajectoryRun:
    """The optimisation run along which estimators are measured.

    Attributes:
        prompt_length: Tokens of a prompt, N.
        steps: Optimisation steps of a target; the state after the last one is not measured.
        num_samples: Samples per step and per draw, S.
        teacher_forcing: Feed the target's own prefix; else decode freely, as in the paper's figure.
        loss: `cross_entropy`, `margin` or `hinge`.
        lr: Adam's learning rate.
        prompt_bos: Put BoS before the prompt.
        phi_init: Initial temperatures: `normal`, `uniform` (the authors' code) or `zero`.
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
        """A run that optimises with an estimator."""
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
    parts = {"run": TrajectoryRun, "study": GradientStudy, "data": TargetDataModule}
    parser = CommandParser.of("gradients", gradients, "--config FILE [options]", {*parts})
    parser.add_argument("-c", "--config", action="config", help="A configuration file, YAML.")
    for name, part in parts.items():
        parser.add_class_arguments(part, name)
    return parser


def gradients(
    run: TrajectoryRun,
    study: GradientStudy,
    data: TargetDataModule,
    trajectory: str = "own",
    seeds: list[int] = [0],  # noqa: B006  # never changed
    out: Path = Path("gradients"),
) -> int:
    """Measure bias and variance of gradient estimators with respect to Z along optimisation runs.

    The reference is the true gradient of the expected loss of hard prompts. One JSON line
    per estimator, target, seed and step goes to gradients.jsonl in the folder `--out`.

    Args:
        run: The optimisation.
        study: What is measured.
        data: LM and targets.
        trajectory: `own` measures each estimator along its own run (as in the paper), the name of
            an estimator measures all of them along the run of that one.
        seeds: One run for each seed.
        out: Folder for the rows.
    """
    path, names = out / FILE_NAME, study.estimators
    refuse_used_file(path)
    check_writable(out, "--out")
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"Expected `--seeds` to be different numbers, but got {seeds}.")
    if trajectory not in (known := ("own", *ESTIMATORS)):
        raise InputError(
            f"Expected `--trajectory` to be one of {', '.join(known)}, but got {trajectory!r}."
        )
    parts = [(name, [name]) for name in names] if trajectory == "own" else [(trajectory, names)]
    for leader, _ in parts:
        run.inverter(ESTIMATORS[leader], seeds[0])  # checks the settings before the LM is loaded
    data.load(default_device())
    started = time.monotonic()
    study.path, study.notify = path, lambda row: _print_row(row, time.monotonic() - started)
    try:
        for leader, study.estimators in parts:
            study.trajectory = "own" if trajectory == "own" else label(ESTIMATORS[leader])
            for seed in seeds:
                run_quietly(run.inverter(ESTIMATORS[leader], seed), data, [study])
    except SystemExit as ended:  # raised by Lightning after Ctrl-C
        raise KeyboardInterrupt from ended
    rows = read_gradient_rows(path)[0]
    _print_medians(rows)
    _print_tests(rows)
    print(f"{len(rows)} rows in {path}")
    return 0


def _print_row(row: GradientRow, seconds: float) -> None:
    names = ("variance_max", "bias_max", "snr", "cosine")
    cells = (f"{name} {_cell(getattr(row, name))}" for name in names)
    place = f"{visible(row.target_id)} seed {row.seed} step {row.step}"
    print(f"{seconds:6.0f} s  {place}  {row.estimator}: {', '.join(cells)}", flush=True)


def _print_medians(rows: list[GradientRow]) -> None:
    kinds = sorted({row.truth["kind"] for row in rows if row.truth is not None})
    truth = f"truth: {', '.join(kinds)}" if kinds else "no truth"
    lines = [
        (name, count, *(_cell(median_statistic(rows, name, column)) for column in STATISTICS))
        for name, count in Counter(row.estimator for row in rows).items()
    ]
    title = f"Medians over rows of values and of the ends of their 95% intervals ({truth})"
    print_table(title, ("estimator", "rows", *STATISTICS), lines, texts=["estimator"])


def _print_tests(rows: list[GradientRow]) -> None:
    cells: dict[str, dict[str, str]] = {}
    for test in ks_tests(rows, _TESTED):
        text = f"{test.distance:.2f}  p {test.adjusted_p_value:.2g}"
        cells.setdefault(f"{test.first} | {test.second}", {})[test.statistic_name] = text
    lines = [[pair, *(found.get(name, "-") for name in _TESTED)] for pair, found in cells.items()]
    title = "Kolmogorov-Smirnov distance D of each pair, and p (two-sided, Holm-corrected)"
    print_table(title, ("estimators", *_TESTED), lines, texts=["estimators"])


def _cell(statistic: Statistic) -> str:
    """A number with its interval; `..` for an end without a bound.

    >>> _cell(Statistic(0.5, 0.25, None))
    '0.5 [0.25 ..]'
    """
    if statistic.value is None:
        return "-"
    low, high = (".." if end is None else f"{end:.2g}" for end in (statistic.low, statistic.high))
    return f"{statistic.value:.2g} [{low} {high}]"
