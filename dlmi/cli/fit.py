"""`fit` through LightningCLI: any method, any setting, resumed or anew."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# lightning 2.6 still calls functions that jsonargparse 4.49 renamed; the user cannot change that.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

from jsonargparse import ArgumentParser, Namespace, lazy_instance  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.loggers import TensorBoardLogger

import dlmi.methods  # noqa: F401  # makes the short names of methods valid
from dlmi.cli.nulls import refuse_nulls
from dlmi.cli.parser import OptionError, plain_errors
from dlmi.cli.run_folder import (
    HERE,
    check_writable,
    follow_checkpoint,
    follow_root,
    last_checkpoint,
    removed_if_refused,
)
from dlmi.errors import InputError, find_input_error
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.run.callbacks.metrics import TensorBoardDetails
from dlmi.run.callbacks.progress import InversionProgress
from dlmi.run.callbacks.results import ResultWriter, refuse_used_folder
from dlmi.run.checks import check_precision, check_workers
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.workers import slurm
from dlmi.run.workers.strategy import TargetParallelStrategy
from dlmi.version import __version__

_USAGE = {"fit": {"usage": "python -m dlmi fit --config FILE [options]"}}


def make_parser() -> ArgumentParser:
    """The options."""
    try:
        _ParserCLI(Inverter, TargetDataModule, parser_kwargs=_USAGE, args=[], **cli_options())
    except _Made as made:
        return made.parser
    raise AssertionError("the parser is made before anything is parsed")


def fit_command(arguments: list[str]) -> int:
    """`python -m dlmi fit`: invert a queue of targets."""
    cli = InversionCLI(
        Inverter,
        TargetDataModule,
        parser_kwargs=_USAGE,
        args=["fit", *arguments],
        **cli_options(),
    )
    return _exit_code(cli)


def _exit_code(cli: "InversionCLI") -> int:
    """0 if all targets are done; else that of the signal, as a shell has it, or 1."""
    model = cli.model
    if not model.stop_requested:
        return 0 if model.workers.ended() is None else 1
    callbacks: list[Any] = cli.trainer.callbacks  # type: ignore[attr-defined]
    [checkpoint] = [c for c in callbacks if isinstance(c, RunCheckpoint)]
    caught = checkpoint.signal or signal.SIGINT
    if caught == signal.SIGUSR1 and slurm.job_id() is not None:
        if cli.trainer.is_global_zero:
            slurm.requeue()
        return 0
    return 128 + caught


def cli_options() -> dict[str, Any]:
    """What `fit` sets that its user need not know."""
    return {
        "auto_configure_optimizers": False,
        "seed_everything_default": 0,
        "save_config_callback": RunConfig,
        "trainer_defaults": {
            "max_epochs": -1,
            "enable_model_summary": False,
            "log_every_n_steps": 10,
            "logger": lazy_instance(
                TensorBoardLogger,
                save_dir=HERE,
                name="lightning_logs",
                default_hp_metric=False,
            ),
            "callbacks": [ResultWriter(), TensorBoardDetails(), InversionProgress()],
        },
    }


class RunConfig(SaveConfigCallback):
    """`config.yaml` of the run's folder; a resumed run keeps the one it began with."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Save once."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        is_there = self.config.continue_run and (folder / self.config_filename).exists()
        if not trainer.strategy.broadcast(is_there):
            super().setup(trainer, pl_module, stage)


class FitParser(LightningArgumentParser):
    """A parser whose errors are one line, not a screen of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise it."""
        raise OptionError(message) from ex


class InversionCLI(LightningCLI):
    """LightningCLI with `fit` alone; resuming continues in the folder of the checkpoint."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """There is nothing to validate, test or predict: results are measured during `fit`."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Our parser in place of Lightning's; otherwise as the base class has it."""
        kwargs.setdefault("dump_header", [f"dlmi=={__version__}"])
        parser = FitParser(**kwargs)
        parser.add_argument("-c", "--config", action="config", help="A configuration file, YAML.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One seed for all, the checkpoint callback's own arguments, and going on with a run."""
        parser.add_argument(
            "--continue_run",
            type=bool,
            default=False,
            help=(
                "Go on in a run folder that holds rows already: finished targets are kept, those "
                "in flight go on from its checkpoint, or start again where there is none."
            ),
        )
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.link_arguments("seed_everything", "model.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As the base class, with errors in plain English."""
        with plain_errors(getattr(self, "_subcommand_parsers", {}).get("fit", parser)):
            super().parse_arguments(parser, args)
        refuse_nulls(self.config.fit, model=Inverter, data=TargetDataModule, trainer=Trainer)

    def _parse_ckpt_path(self) -> None:
        """Nothing: the base class would let the checkpoint's settings override the user's.

        `Inverter.on_load_checkpoint` compares them instead and refuses a checkpoint of others.
        """

    def before_instantiate_classes(self) -> None:
        """Find the run's folder, that of the checkpoint if it goes on; choose the strategy."""
        config = self.config.fit
        check_precision(config.trainer.precision)  # the trainer itself fails on some, in many lines
        config.weights_only = True  # a checkpoint is data: it never runs code
        with as_input_error():
            workers = _workers_wanted(config.trainer)
        if config.trainer.strategy == "auto" and workers > 1:
            config.trainer.strategy = TargetParallelStrategy.__name__
        follow_root(config.trainer)
        if slurm.job_id() is not None:
            self._go_on_after_requeue(config)
        if config.continue_run and not config.ckpt_path:
            config.ckpt_path = last_checkpoint(config.trainer.logger)
        if config.ckpt_path:
            config.continue_run = True
            follow_checkpoint(config.ckpt_path, config.trainer.logger)

    def _go_on_after_requeue(self, config: Namespace) -> None:
        """A job that SLURM has started again goes on in the folder of its first part."""
        self._settings = self.parser.dump(self.config, skip_check=True)
        options = getattr(config.trainer.logger, "init_args", None)
        if options is None or options.get("version") is not None or config.ckpt_path:
            return
        runs = Path(options.save_dir) / (options.name or "")
        if folder := slurm.earlier_folder(runs, self._settings):
            options.version = folder.name
            config.continue_run = True

    def _set_seed(self) -> None:
        with as_input_error():
            super()._set_seed()

    def instantiate_classes(self) -> None:
        """Make trainer, inverter and data; what cannot be made of the settings is their mistake."""
        with as_input_error():
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        with contextlib.ExitStack() as stack:
            if self.trainer.is_global_zero:
                stack.enter_context(removed_if_refused(self._folder))
            super()._run_subcommand(subcommand)

    @property
    def _folder(self) -> Path:
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

    def before_fit(self) -> None:
        """See to the folder, then load the LM, before other workers are started."""
        check_workers(self.trainer, self.datamodule)
        continues = self.config.fit.continue_run
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, InversionCallback):
                callback.continues = continues
        if self.trainer.is_global_zero:
            check_writable(self._folder)
            if not continues:
                refuse_used_folder(self._folder)
        self.datamodule.load(self.trainer.strategy.root_device)
        if self.trainer.world_size > 1:
            self.model.check(self.trainer, self.datamodule)
        if self.trainer.is_global_zero:
            self._claim(self._folder)

    def _claim(self, folder: Path) -> None:
        """From here on the folder is this run's."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ResultWriter):
                callback.claim(folder)
        if slurm.job_id() is not None:
            slurm.leave_note(folder, self._settings)


def _workers_wanted(trainer: Namespace) -> int:
    """How many workers a trainer of these settings has; `devices: auto` is all that there are."""
    names = ("accelerator", "devices", "num_nodes")
    probe = Trainer(**{name: trainer[name] for name in names}, logger=False)
    return probe.world_size


@contextlib.contextmanager
def as_input_error() -> Iterator[None]:
    """Turn what Lightning raises for settings of no use into `InputError`."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError, MisconfigurationException) as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise find_input_error(error) or InputError(
            f"Expected settings that Lightning accepts, but it says: {reason}"
        ) from error


class _Made(Exception):
    """Carries a parser out of the constructor of a CLI, which would go on to parse and run."""

    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


class _ParserCLI(InversionCLI):
    """Makes the parser of `fit` and stops."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse nothing."""
        raise _Made(self._subcommand_parsers["fit"])
