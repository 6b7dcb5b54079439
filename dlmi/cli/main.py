"""The entry point of the command line.

An error in the user's input ends in one line and exit code 2, Ctrl-C in exit code 130.
"""

import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from dlmi.errors import InputError, RunStopped, find_input_error, run_stopped_behind
from dlmi.text import visible
from dlmi.version import __version__

# What a command does, and an example.
COMMANDS = {
    "invert": ("find the prompt of one text", 'invert " Paris."'),
    "fit": ("invert a queue of targets", "fit --config quickstart"),
    "targets": ("write targets to a file", "targets --out targets.jsonl"),
    "verify": ("decode found prompts again", "verify lightning_logs/version_0"),
    "compare": ("run a grid of methods", "compare --config small"),
    "score": ("accuracy on questions", 'score --prompt " Think first."'),
    "report": ("figures, tables and a page", "report lightning_logs --out report"),
    "bench": ("measure the speed here", "bench"),
    "gradients": ("bias, variance of gradients", "gradients --config small"),
    "completion": ("script for Tab completion", "completion"),
}
# Part of the installed package; in a clone, a link to the folder at its top.
CONFIGS = (Path(__file__).parents[1] / "configs").resolve()
_CONFIG = ("-c", "--config")
_HELP = """\
usage: python -m dlmi COMMAND [options]

Find the prompt that makes a frozen language model say exactly this.

commands:
{commands}

options:
  --help     this text; `python -m dlmi COMMAND --help` has the options of a command,
             `python -m dlmi fit --model.method.help DLMI` those of a method
  --version  the version
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; `args` as on the command line, without the program's name."""
    arguments = list(sys.argv[1:] if args is None else args)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        lines = (f"  {n:<10}  {what:<27}  python -m dlmi {e}" for n, (what, e) in COMMANDS.items())
        print(_HELP.format(commands="\n".join(lines)), end="")
        sys.exit(0 if arguments else 2)
    if command == "--version":
        print(f"dlmi {__version__}")
        sys.exit(0)
    if command not in COMMANDS:
        _end(f"error: Expected a command ({', '.join(COMMANDS)}), but got {command!r}.")
    _quieten()
    try:
        sys.exit(_run(command, arguments[1:]))
    except UnicodeDecodeError as error:
        _end(f"error: Expected files of UTF-8 text, but one is not ({error}).")
    except ValueError as error:
        if (mistake := find_input_error(error)) is None:
            raise
        _end(f"error: {_own_names(command, str(mistake))}")
    except (RunStopped, OSError) as error:
        _end(f"stopped: {run_stopped_behind(error)}", 1)
    except KeyboardInterrupt:
        _end("interrupted", 130)


def _end(message: str, code: int = 2) -> NoReturn:
    """Exit with one line on stderr."""
    print(f"dlmi: {visible(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def _own_names(command: str, message: str) -> str:
    """Replace the names of options in a message by those that a command has.

    >>> _own_names("invert", "Expected `model.fluency`, but got `--data.lm x`.")
    'Expected `fluency`, but got `--lm x`.'
    >>> _own_names("fit", "Expected `lm` to be a folder.")
    'Expected `data.lm` to be a folder.'
    """
    if command in ("fit", "compare"):
        return message.replace("`lm`", "`data.lm`")
    sections = r"model\.(?:method\.)?" if command == "gradients" else r"(?:model|data)\."
    return re.sub(rf"(`|--){sections}", r"\1run." if command == "gradients" else r"\1", message)


def _run(name: str, arguments: list[str]) -> int:
    """Import a command and run it; importing torch takes seconds, so it is not done earlier."""
    if name in ("fit", "compare", "gradients"):
        arguments = _with_files(name, arguments)
    with Console(stderr=True).status("starting"):  # only on a terminal
        module: Any = importlib.import_module(f"dlmi.cli.{name}")
    if "torch" in sys.modules:
        from dlmi.lm.memory import keep_freed_memory
        from dlmi.run.full_disk import watch_threads

        keep_freed_memory()
        watch_threads()
    command = getattr(module, f"{name}_command", None) or module.make_parser().run
    code: int = command(arguments)
    return code


def _with_files(command: str, arguments: list[str]) -> list[str]:
    """The arguments of a command, with names of configurations replaced by their paths."""
    found = list(arguments)
    for number, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if number and arguments[number - 1] in _CONFIG:
            found[number] = _config_file(command, word)
        elif equals and option in _CONFIG:
            found[number] = f"{option}={_config_file(command, value)}"
    return found


def _config_file(command: str, given: str) -> str:
    """The path of a packaged configuration; an existing file and inline YAML stay as they are."""
    if not re.fullmatch(r"[\w./~-]+", given) or Path(given).exists():
        return given
    name = given.removeprefix("configs/").removesuffix(".yaml")
    files = {file.relative_to(CONFIGS).as_posix(): str(file) for file in CONFIGS.rglob("*.yaml")}
    packaged = {path.removesuffix(".yaml"): file for path, file in files.items()}
    of_command = f"{command}/{name}"
    if found := packaged.get(name) or packaged.get(of_command):
        return found
    close = [n for word in (of_command, name) for n in get_close_matches(word, packaged, 1, 0.8)]
    hint = f"Did you mean `{close[0]}`?" if close else f"They are in {CONFIGS}."
    raise InputError(
        f"Expected `config` to be a file, or the name of one that comes with dlmi, but got "
        f"{given!r}. {hint}"
    )


def _quieten() -> None:
    """Show messages of this program; silence warnings that its users cannot act on."""
    own = logging.getLogger("dlmi.lm.measured")
    if not own.handlers:
        own.addHandler(logging.StreamHandler())
    own.setLevel(logging.INFO)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is loaded
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*LightningCLI's args parameter.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*No seed found, seed set to 0.*",  # every row has the seed
    ):
        warnings.filterwarnings("ignore", message=message)
