"""The command line: `fit` through LightningCLI, the other commands beside it.

Every mistake of the user ends in one line and exit code 2; Ctrl-C ends in exit code 130.
"""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# lightning 2.6 still calls functions that jsonargparse 4.49 renamed; the user cannot mend that.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

from jsonargparse import lazy_instance  # type: ignore[attr-defined]
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.loggers import TensorBoardLogger

import dlmi.methods
from dlmi.bench import bench_command
from dlmi.callbacks import InversionProgress, ResultWriter, RunCheckpoint, TensorBoardDetails
from dlmi.callbacks.results import refuse_used_folder
from dlmi.checks import check_run
from dlmi.commands import targets_command, verify_command
from dlmi.data import TargetDataModule
from dlmi.errors import InputError
from dlmi.gradients.command import gradients_command
from dlmi.inverter import Inverter
from dlmi.memory import keep_freed_memory
from dlmi.report.command import report_command
from dlmi.version import __version__

HELP = """\
usage: python -m dlmi COMMAND [options]

Find the prompt that makes a frozen language model say exactly this.

commands:
  fit       invert a queue of targets:   python -m dlmi fit --config configs/quickstart.yaml
  targets   write targets to a file:     python -m dlmi targets --out targets.jsonl
  verify    decode found prompts again:  python -m dlmi verify lightning_logs/version_0
  report    figures, tables and a page:  python -m dlmi report lightning_logs --out report
  bench     how fast it is, here:        python -m dlmi bench
  gradients bias, variance of gradients: python -m dlmi gradients -c configs/gradients/small.yaml

options:
  --help     this text; `python -m dlmi COMMAND --help` has the options of a command,
             `python -m dlmi fit --model.help DLMI` those of a method
  --version  the version
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; `args` as on the command line, without the program's name."""
    arguments = list(sys.argv[1:] if args is None else args)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        sys.exit(0 if arguments else 2)
    if command == "--version":
        print(f"dlmi {__version__}")
        sys.exit(0)
    if command not in COMMANDS:
        fail(f"Expected a command ({', '.join(COMMANDS)}), but got {command!r}.")
    _quieten()
    keep_freed_memory()
    try:
        sys.exit(COMMANDS[command](arguments[1:]))
    except ValueError as error:
        fail(str(_input_error(error)))
    except KeyboardInterrupt:
        print("dlmi: interrupted", file=sys.stderr)
        sys.exit(130)


def _input_error(error: BaseException) -> InputError:
    """The user's mistake behind an error (jsonargparse wraps it); any other error is raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return cause
        cause = cause.__cause__
    raise error


def fail(message: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"dlmi: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _fit(arguments: list[str]) -> int:
    cli = InversionCLI(
        Inverter,
        TargetDataModule,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        save_config_callback=RunConfig,
        trainer_defaults={
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
        parser_kwargs={"fit": {"usage": "python -m dlmi fit --config FILE [options]"}},
        args=["fit", *arguments],
    )
    return 130 if cli.model.stop_requested else 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "fit": _fit,
    "targets": targets_command,
    "verify": verify_command,
    "report": report_command,
    "bench": bench_command,
    "gradients": gradients_command,
}


class RunConfig(SaveConfigCallback):
    """`config.yaml` of the run's folder; a resumed run keeps the one it began with."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Save once."""
        if self.config.get("ckpt_path") is None:
            super().setup(trainer, pl_module, stage)


class OneLineParser(LightningArgumentParser):
    """A parser whose errors are one line, not a screen of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the line and exit with 2."""
        fail(_clearer(message))


def _clearer(message: str) -> str:
    """Jsonargparse's message, with the way out where it leaves one open."""
    methods = ", ".join(dlmi.methods.__all__)
    if unknown := re.search(r"Expected a dot import path string: (\S+)", message):
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
    return message


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
        """One seed for all, and the checkpoint callback's own arguments."""
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.link_arguments("seed_everything", "model.init_args.seed")

    def _parse_ckpt_path(self) -> None:
        """Nothing: the base class would let the checkpoint's settings override the user's.

        `Inverter.on_load_checkpoint` compares them instead and refuses a checkpoint of others.
        """

    def before_instantiate_classes(self) -> None:
        """Send a resumed run to the folder that its checkpoint lies in."""
        config = self.config.fit
        config.weights_only = True  # a checkpoint is data: it never runs code
        if not config.ckpt_path:
            return
        checkpoint = Path(config.ckpt_path)
        if not checkpoint.is_file():
            raise InputError(
                f"Expected `ckpt_path` to be a checkpoint file, but {config.ckpt_path!r} is not "
                "one. They lie in `lightning_logs/version_*/checkpoints`."
            )
        run = checkpoint.resolve().parents[1]
        logger = config.trainer.logger
        if checkpoint.parent.name == "checkpoints" and hasattr(logger, "init_args"):
            logger.init_args.save_dir = str(run.parent.parent)
            logger.init_args.name = run.parent.name
            logger.init_args.version = run.name

    def before_fit(self) -> None:
        """Refuse bad input before a run folder is made."""
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        _check_writable(folder)
        if not self.config.fit.ckpt_path:
            refuse_used_folder(folder)
        device = self.trainer.strategy.root_device
        self.datamodule.load(device)
        check_run(self.trainer, self.datamodule, self.model)


def _check_writable(folder: Path) -> None:
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(
            f"Expected a run folder that can be written, but {folder} cannot ({existing} is "
            f"{'read-only' if existing.is_dir() else 'a file'}). "
            "Choose another with `--trainer.logger.init_args.save_dir`."
        )


def _quieten() -> None:
    """Silence advice that does not concern the user of this program."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*LightningCLI's args parameter.*",
        ".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=message)
