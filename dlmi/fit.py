"""`fit` through LightningCLI: any method, any setting, resumed or anew."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# lightning 2.6 still calls functions that jsonargparse 4.49 renamed; the user cannot mend that.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

from jsonargparse import Namespace, lazy_instance  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.loggers import TensorBoardLogger

import dlmi.methods
from dlmi import slurm
from dlmi.callbacks import InversionProgress, ResultWriter, RunCheckpoint, TensorBoardDetails
from dlmi.callbacks.base import InversionCallback
from dlmi.callbacks.results import refuse_used_folder
from dlmi.checkpoints import LAST, before, check_checkpoint_file
from dlmi.checks import check_precision, check_run
from dlmi.data import TargetDataModule
from dlmi.errors import InputError, find_input_error, input_error_behind
from dlmi.inverter import Inverter
from dlmi.strategy import TargetParallelStrategy
from dlmi.version import __version__


def fit_command(arguments: list[str]) -> int:
    """`python -m dlmi fit`: invert a queue of targets."""
    usage = {"fit": {"usage": "python -m dlmi fit --config FILE [options]"}}
    cli = InversionCLI(
        Inverter,
        TargetDataModule,
        parser_kwargs=usage,
        args=["fit", *arguments],
        **_cli_options(),
    )
    return _exit_code(cli)


def _exit_code(cli: "InversionCLI") -> int:
    """0 if all targets are done; else that of the signal, as a shell has it, or 1."""
    model = cli.model
    if model.ranks.trouble is not None:
        return 1
    if not model.stop_requested:
        return 0
    callbacks: list[Any] = cli.trainer.callbacks  # type: ignore[attr-defined]
    [checkpoint] = [c for c in callbacks if isinstance(c, RunCheckpoint)]
    caught = checkpoint.signal or signal.SIGINT  # another rank's: what it was is that rank's news
    if caught == signal.SIGUSR1 and slurm.job_id() is not None:
        if cli.trainer.is_global_zero:
            slurm.requeue()
        return 0
    return 128 + caught


def _cli_options() -> dict[str, Any]:
    return {
        "subclass_mode_model": True,
        "auto_configure_optimizers": False,
        "seed_everything_default": 0,
        "save_config_callback": RunConfig,
        "trainer_defaults": {
            "max_epochs": -1,
            "enable_model_summary": False,
            "log_every_n_steps": 10,
            "logger": lazy_instance(
                TensorBoardLogger,
                save_dir=".",
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


class OneLineParser(LightningArgumentParser):
    """A parser whose errors are one line, not a screen of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise it."""
        raise InputError(_clearer(message))


def _clearer(message: str) -> str:
    """Jsonargparse's message, with the way out where it leaves one open."""
    methods = ", ".join(dlmi.methods.__all__)
    unknown = re.search(r"Expected a dot import path string: (\S+)", message)
    if unknown and 'key "model"' in message:
        return f"Expected `model` to be a method ({methods}), but got {unknown[1]!r}."
    if "required: fit.model" in message:
        return (
            "Expected a method, but got none. Give `--config configs/quickstart.yaml`, or "
            f"`--model` with one of: {methods}."
        )
    if unknown := re.search(r"(?:[Oo]ption '|unrecognized arguments: )([^' ]+)", message):
        return (
            f"Expected options that exist, but got {unknown[1]!r}. `python -m dlmi fit --help` "
            "lists them, `python -m dlmi fit --model.help METHOD` those of a method."
        )
    # A mistake inside `model` comes wrapped in a list of all that was tried, over several lines.
    _, *tried = re.split(r"^ *- ", message, flags=re.M)
    found = [text for text in tried if "NoneType" not in text]
    if option := re.match(r'Parser key "((?:data|trainer)\.\w+)"', message):
        kinds = " or ".join(re.sub(r"Expected an? |typing\.|<class|>", "", t) for t in found)
        value = message.rpartition("Given value: ")[2]
        return " ".join(f"Expected `{option[1]}` to be {kinds}, but got {value}.".split())
    return found[0] if found else message.removeprefix('Parser key "config": ')


class InversionCLI(LightningCLI):
    """LightningCLI with `fit` alone; resuming continues in the folder of the checkpoint."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """There is nothing to validate, test or predict: results are measured during `fit`."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Our parser in place of Lightning's; otherwise as the base class has it."""
        kwargs.setdefault("dump_header", [f"dlmi=={__version__}"])
        parser = OneLineParser(**kwargs)
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
        parser.link_arguments("seed_everything", "model.init_args.seed")

    def _parse_ckpt_path(self) -> None:
        """Nothing: the base class would let the checkpoint's settings override the user's.

        `Inverter.on_load_checkpoint` compares them instead and refuses a checkpoint of others.
        """

    def before_instantiate_classes(self) -> None:
        """Send a resumed run to the folder that its checkpoint lies in; choose the strategy."""
        config = self.config.fit
        check_precision(config.trainer.precision)  # the trainer itself fails on some, in many lines
        config.weights_only = True  # a checkpoint is data: it never runs code
        with _told_in_one_line():
            ranks = _ranks_wanted(config.trainer)
        if config.trainer.strategy == "auto" and ranks > 1:
            config.trainer.strategy = TargetParallelStrategy.__name__
        if slurm.job_id() is not None:
            self._go_on_after_requeue(config)
        if config.continue_run and not config.ckpt_path:
            config.ckpt_path = _last_checkpoint(config.trainer.logger)
        if not config.ckpt_path:
            return
        config.continue_run = True
        checkpoint = Path(config.ckpt_path)
        if not (checkpoint.is_file() or before(checkpoint).is_file()):
            raise InputError(
                f"Expected `ckpt_path` to be a checkpoint file, but {config.ckpt_path!r} is not "
                "one. They lie in `lightning_logs/version_*/checkpoints`."
            )
        check_checkpoint_file(checkpoint)
        run = checkpoint.resolve().parents[1]
        logger = config.trainer.logger
        if checkpoint.parent.name == "checkpoints" and hasattr(logger, "init_args"):
            logger.init_args.save_dir = str(run.parent.parent)
            logger.init_args.name = run.parent.name
            logger.init_args.version = run.name

    def _go_on_after_requeue(self, config: Namespace) -> None:
        """A job that SLURM has started again goes on in the folder of its first part."""
        self._settings_key = slurm.settings_key(self.parser.dump(self.config, skip_check=True))
        options = getattr(config.trainer.logger, "init_args", None)
        if options is None or options.get("version") is not None or config.ckpt_path:
            return
        runs = Path(options.save_dir) / (options.name or "")
        if folder := slurm.earlier_folder(runs, self._settings_key):
            options.version = folder.name
            config.continue_run = True

    def _set_seed(self) -> None:
        with _told_in_one_line():
            super()._set_seed()

    def instantiate_classes(self) -> None:
        """Make trainer, method and data; what cannot be made of the settings is their mistake."""
        with _told_in_one_line():
            super().instantiate_classes()

    def before_fit(self) -> None:
        """Refuse bad input before a run folder is made and before other ranks are started."""
        continues = self.config.fit.continue_run
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, InversionCallback):
                callback.continues = continues
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        if self.trainer.is_global_zero:
            _check_writable(folder)
            if not continues:
                refuse_used_folder(folder)
        self.datamodule.load(self.trainer.strategy.root_device)
        check_run(self.trainer, self.datamodule, self.model)
        if self.trainer.is_global_zero:
            self._claim(folder)

    def _claim(self, folder: Path) -> None:
        """From here on the folder is this run's."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ResultWriter):
                callback.claim(folder)
        if slurm.job_id() is not None:
            slurm.leave_note(folder, self._settings_key)


def _ranks_wanted(trainer: Namespace) -> int:
    """How many ranks a trainer of these settings has; `devices: auto` is as many as there are."""
    names = ("accelerator", "devices", "num_nodes")
    probe = Trainer(**{name: trainer[name] for name in names}, logger=False)
    return probe.world_size


@contextlib.contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Turn what Lightning and jsonargparse raise for settings of no use into `InputError`."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError, MisconfigurationException) as error:
        reason = _clearer(str(error)).strip().partition("\n")[0][:300].rstrip(".")
        hint = "One of them is null; leave it out." if "NoneType" in str(error) else ""
        raise find_input_error(error) or InputError(
            f"Expected settings that a run can be made of, but got others ({reason}). {hint}"
        ) from error


def _last_checkpoint(logger: Any) -> str | None:
    """The checkpoint of the run folder that a logger's settings name, where there is one."""
    options = getattr(logger, "init_args", None)
    if options is None or options.get("version") is None:
        raise InputError(
            "Expected `continue_run` to come with the run's folder, but it is not named. Give its "
            "`--trainer.logger.init_args.version`, or resume with `--ckpt_path`."
        )
    version = options.version
    folder = version if isinstance(version, str) else f"version_{version}"
    last = Path(options.save_dir) / (options.name or "") / folder / "checkpoints" / LAST
    return str(last) if last.is_file() or before(last).is_file() else None


def _check_writable(folder: Path) -> None:
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(
            f"Expected a run folder that can be written, but {folder} cannot ({existing} is "
            f"{'read-only' if existing.is_dir() else 'a file'}). "
            "Choose another with `--trainer.logger.init_args.save_dir`."
        )


class _PlannedCLI(InversionCLI):
    """Reads what `fit` would run, and makes method and data module alone: no LM, no folder."""

    def before_instantiate_classes(self) -> None:
        """Nothing to look for: there is no run yet."""

    def instantiate_classes(self) -> None:
        """All but the trainer, so that mistakes in settings show."""
        with _told_in_one_line():
            self.model = self.parser.instantiate_classes(self.config).model


def plan_fit(config: Path, overrides: dict[str, Any]) -> tuple[dict[str, Any], Inverter]:
    """What `fit` would see, and its method, without running it.

    Args:
        config: A configuration file of `fit`.
        overrides: Settings on top of it, as a second file would hold them.

    Raises:
        InputError: Where `fit` would refuse them.
    """
    arguments = ["--config", str(config), "--config", json.dumps(overrides)]
    try:
        cli = _PlannedCLI(Inverter, TargetDataModule, args=arguments, run=False, **_cli_options())
    except ValueError as error:
        raise input_error_behind(error) from error
    settings: dict[str, Any] = cli.config.as_dict()
    return settings, cli.model
