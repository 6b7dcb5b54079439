"""`dlmi completion`: a script with which bash completes commands and options at a key press.

All words are in the script, so that no Python is started at a key. Make it anew when the package
is updated.
"""

import importlib

from jsonargparse import ArgumentParser

from dlmi.cli.main import COMMANDS
from dlmi.cli.parser import CommandParser

_HEADER = """\
# Completion of dlmi for bash, made by `dlmi completion`. For now: source <(dlmi completion)
# For good:  dlmi completion > ~/.local/share/bash-completion/completions/dlmi
# In zsh:    autoload -U bashcompinit && bashcompinit && source <(dlmi completion)
"""


def make_parser() -> CommandParser:
    """No options."""
    return CommandParser.of("completion", completion, usage="")


def completion_command(arguments: list[str]) -> int:
    """Exit code 0."""
    return completion(**make_parser().read(arguments))


def completion() -> int:
    """Print a script for completion in bash: source <(dlmi completion)."""
    whole = ArgumentParser(prog="dlmi")
    whole.add_argument("--version", action="store_true")
    commands = whole.add_subcommands()
    for name in COMMANDS:
        commands.add_subcommand(name, importlib.import_module(f"dlmi.cli.{name}").make_parser())
    script = whole.get_completion_script("shtab-bash")
    print(_HEADER + script.replace("dlmi.methods.", ""))  # `--model DLMI` is enough
    return 0
