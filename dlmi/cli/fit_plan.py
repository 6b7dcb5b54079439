"""What `fit` would run, without running it."""

import functools
import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from dlmi.cli.fit import InversionCLI, as_input_error, cli_options
from dlmi.cli.nulls import refuse_nulls
from dlmi.cli.parser import plain_errors
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter


class _PlanningCLI(InversionCLI):
    """Makes the parser of `fit`, once for many plans, and nothing else."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Later, each time."""
        self.config = parser.get_defaults()

    def _set_seed(self) -> None:
        """A plan draws nothing."""

    def before_instantiate_classes(self) -> None:
        """Nothing to look for: there is no run yet."""

    def instantiate_classes(self) -> None:
        """Later, each time."""


@functools.cache
def _planning_cli() -> _PlanningCLI:
    return _PlanningCLI(Inverter, TargetDataModule, args=[], run=False, **cli_options())


def plan_fit(
    config: Path, overrides: dict[str, Any]
) -> tuple[dict[str, Any], Inverter, TargetDataModule]:
    """What `fit` would see, and what it would run, without running it.

    No LM is loaded and no folder is looked at.

    Args:
        config: A configuration file of `fit`.
        overrides: Settings on top of it, as a second file would hold them.

    Raises:
        InputError: Where `fit` would refuse them.
    """
    cli, arguments = _planning_cli(), ["--config", str(config), "--config", json.dumps(overrides)]
    with plain_errors(cli.parser):
        cli.config = cli.parser.parse_args(arguments)
    refuse_nulls(cli.config, model=Inverter, data=TargetDataModule, trainer=Trainer)
    with as_input_error():
        made = cli.parser.instantiate_classes(cli.config)
    settings: dict[str, Any] = cli.config.as_dict()
    return settings, made.model, made.data
