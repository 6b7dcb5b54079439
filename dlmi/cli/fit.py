"""`python -m dlmi fit`, built on LightningCLI."""

import contextlib
import functools
import json
import os
import signal
from pathlib import Path
from typing import Any, cast

from jsonargparse import Namespace, lazy_instance  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import dlmi.methods  # noqa: F401  # makes the short names of methods valid
from dlmi.cli.output import check_writable
from dlmi.cli.parser import CommandParser, plain_errors
from dlmi.cli.run_folder import HERE, RUNS, choose_folder, removed_if_refused
from dlmi.errors import InputError, first_line
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.run.callbacks.metrics import TensorBoardDetails
from dlmi.run.callbacks.progress import InversionProgress
from dlmi.run.callbacks.results import ResultWriter, refuse_used_folder
from dlmi.run.checks import check_precision, check_workers
from dlmi.run.data import TargetDataModule
from dlmi.run.folder import is_trial, run_folder
from dlmi.run.inverter import Inverter
from dlmi.run.workers import slurm
from dlmi.run.workers.strategy import TargetParallelStrategy
from dlmi.version import __version__

# What Lightning raises for invalid settings.
_REFUSALS = (ValueError, TypeError, ArithmeticError, MisconfigurationException)


def fit_command(arguments: list[str]) -> int:
    """Invert a queue of targets; returns the exit code."""
    with plain_errors(None, *_REFUSALS):
        cli = InversionCLI(arguments)
    leads = cli.trainer.is_global_zero
    with removed_if_refused(run_folder(cli.trainer)) if leads else contextlib.nullcontext():
        cli.prepare()
        # A checkpoint is data: it never runs code.
        checkpoint = {"ckpt_path": cli.config.ckpt_path, "weights_only": True}
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, **checkpoint)
    return _exit_code(cli)


def _exit_code(cli: "InversionCLI") -> int:
    """0 if all targets are done, 128 plus its number after a signal, else 1."""
    if not cli.model.stop_requested:
        return 0 if cli.model.workers.ended() is None else 1
    caught: int = cli.config_init.checkpoint.signal or signal.SIGINT
    if caught == signal.SIGUSR1 and slurm.job_id() is not None:
        if cli.trainer.is_global_zero:
            slurm.requeue()
        return 0
    return 128 + caught


class RunConfig(SaveConfigCallback):
    """Writes `config.yaml` into the run's folder; a resumed run keeps its first one."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write the file."""
        folder = run_folder(trainer)
        path = folder / self.config_filename
        if trainer.is_global_zero and not (self.config.continue_run and path.exists()):
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, str(path), skip_none=False, overwrite=True)


class FitParser(CommandParser, LightningArgumentParser):
    """Lightning's parser, with errors of one line."""


class InversionCLI(LightningCLI):
    """LightningCLI without subcommands: there is only `fit`."""

    def __init__(self, arguments: list[str]) -> None:
        self._results = ResultWriter()
        logger = {"save_dir": HERE, "name": RUNS, "default_hp_metric": False}
        super().__init__(
            Inverter,
            TargetDataModule,
            save_config_callback=RunConfig,
            trainer_defaults={
                "max_epochs": -1,
                "enable_model_summary": False,
                "log_every_n_steps": 10,
                "logger": lazy_instance(TensorBoardLogger, **logger),
                "callbacks": [self._results, TensorBoardDetails(), InversionProgress()],
            },
            seed_everything_default=0,
            parser_kwargs={
                "prog": "python -m dlmi fit",
                "usage": "python -m dlmi fit --config FILE [options]",
                "description": "Invert a queue of targets.",
                "dump_header": [f"dlmi=={__version__}"],
            },
            parser_class=FitParser,
            args=arguments,
            run=False,
            auto_configure_optimizers=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `continue_run`, the options of the checkpoint callback and those of `Trainer.fit`."""
        parser.add_argument(
            "--continue_run",
            type=bool,
            default=False,
            help="Continue in a run folder that has rows: finished targets are kept, the others "
            "continue from its checkpoint, or start again where there is none.",
        )
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        parser.add_method_arguments(Trainer, "fit", skip=set(self.subcommands()["fit"]))

    def before_instantiate_classes(self) -> None:
        """Choose the strategy and the run's folder."""
        trainer = self.config.trainer
        check_precision(trainer.precision)  # the trainer itself fails on some, in many lines
        self.config.weights_only = True
        if trainer.strategy == "auto" and _workers_wanted(trainer) > 1:
            trainer.strategy = TargetParallelStrategy.__name__
        self._job_settings = None
        if slurm.job_id() is not None:
            self._job_settings = self.parser.dump(self.config, skip_check=True)
        choose_folder(self.config, self._job_settings)

    def prepare(self) -> None:
        """Check the folder, then load the LM, before other workers are started."""
        check_workers(self.trainer, self.datamodule)
        continues = self.config.continue_run
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, InversionCallback):
                callback.continues = continues
        folder = None  # or that of the run, where this process is the one that makes it
        if self.trainer.is_global_zero and not is_trial(self.trainer):
            folder = run_folder(self.trainer)
            check_writable(folder, "--trainer.default_root_dir")
            if not continues:
                refuse_used_folder(folder)
        self.datamodule.load(self.trainer.strategy.root_device)
        if self.trainer.world_size > 1:
            self.model.check(self.trainer, self.datamodule)
        if folder is not None:  # from here on it is this run's
            for logger in self.trainer.loggers:
                if isinstance(logger, CSVLogger):  # it warns if the folder has files by then
                    _ = logger.experiment
            self._results.claim(folder)
            if self._job_settings is not None:
                slurm.leave_note(folder, self._job_settings)


def _seed(seed_everything: bool | int) -> int:
    """The seed of a run; for `true` and `false` the one that Lightning takes."""
    if isinstance(seed_everything, bool):
        return int(os.environ.get("PL_GLOBAL_SEED", 0))
    return seed_everything


def _workers_wanted(trainer: Namespace) -> int:
    """The number of workers of a trainer; `InputError` for devices that are not there."""
    places = {name: trainer[name] for name in ("accelerator", "devices", "num_nodes")}
    try:
        return Trainer(**places, logger=False).world_size
    except (ValueError, MisconfigurationException, ModuleNotFoundError) as error:
        raise InputError(
            f"Expected `trainer.accelerator` {trainer.accelerator} and `trainer.devices` "
            f"{trainer.devices} to be available on this machine, but they are not "
            f"({first_line(error)}). Use `--trainer.accelerator cpu` or `auto`."
        ) from error


class _ParserCLI(InversionCLI):
    """Makes the parser of `fit` and runs nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Take the defaults."""
        self.config = parser.get_defaults()

    def before_instantiate_classes(self) -> None:
        """Do nothing."""

    def instantiate_classes(self) -> None:
        """Do nothing."""


@functools.cache  # it is slow to make, and `plan_fit` is called for many cells
def _parser_cli() -> _ParserCLI:
    return _ParserCLI([])


def make_parser() -> CommandParser:
    """The parser of `fit`."""
    return cast(FitParser, _parser_cli().parser)


def plan_fit(
    config: Path, overrides: dict[str, Any]
) -> tuple[dict[str, Any], Inverter, TargetDataModule]:
    """The settings, module and data of a run of `fit`, without an LM or a folder.

    `overrides` are settings on top of the file `config`. Raises `InputError` where `fit` would.
    """
    cli, words = _parser_cli(), ["--config", str(config), "--config", json.dumps(overrides)]
    with plain_errors(None, *_REFUSALS):
        cli.config = cli.parser.parse_args(words)  # Lightning reads it when it makes the classes
        made = cli.parser.instantiate_classes(cli.config)
    return cli.config.as_dict(), made.model, made.data
