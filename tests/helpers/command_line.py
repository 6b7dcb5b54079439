"""The command line, in this process."""

import pytest

from dlmi.cli.main import main
from helpers.subprocess_runs import ROOT

CONFIGS = ROOT / "configs"


def run(*arguments):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code or 0
