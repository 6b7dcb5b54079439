"""The command line: `fit` through LightningCLI, the other commands beside it.

Every mistake of the user ends in one line and exit code 2; Ctrl-C ends in exit code 130.
"""

import importlib
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console

from dlmi.cli.named_configs import with_files
from dlmi.errors import RunStopped, find_input_error, run_stopped_behind
from dlmi.text import visible
from dlmi.version import __version__

HELP = """\
usage: python -m dlmi COMMAND [options]

Find the prompt that makes a frozen language model say exactly this.

commands:
  invert    find the prompt of one text: python -m dlmi invert " Paris."
  fit       invert a queue of targets:   python -m dlmi fit --config quickstart
  targets   write targets to a file:     python -m dlmi targets --out targets.jsonl
  verify    decode found prompts again:  python -m dlmi verify lightning_logs/version_0
  compare   run a grid of methods:       python -m dlmi compare --config small
  score     right answers of prompts:    python -m dlmi score --prompt " Think first."
  report    figures, tables and a page:  python -m dlmi report lightning_logs --out report
  bench     how fast it is, here:        python -m dlmi bench
  gradients bias, variance of gradients: python -m dlmi gradients --config small
  completion  options at a key press:    source <(dlmi completion)

options:
  --help     this text; `python -m dlmi COMMAND --help` has the options of a command,
             `python -m dlmi fit --model.method.help DLMI` those of a method
  --version  the version
"""
COMMANDS = (
    *("invert", "fit", "targets", "verify", "compare", "score", "report", "bench", "gradients"),
    "completion",
)


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
    try:
        sys.exit(_run(command, arguments[1:]))
    except UnicodeDecodeError as error:
        fail(f"Expected files of UTF-8 text, but one is not ({error}).")
    except ValueError as error:
        if (mistake := find_input_error(error)) is None:
            raise
        fail(_own_names(command, str(mistake)))
    except (RunStopped, OSError) as error:
        stopped = run_stopped_behind(error)
        print(f"dlmi: stopped: {visible(' '.join(str(stopped).split()))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("dlmi: interrupted", file=sys.stderr)
        sys.exit(130)


def fail(message: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"dlmi: error: {visible(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


def _own_names(command: str, message: str) -> str:
    """A message with the options of a command; runs and LMs name those of `fit`.

    >>> _own_names("invert", "Expected `model.fluency`, but got `--data.lm x`.")
    'Expected `fluency`, but got `--lm x`.'
    """
    if command in ("fit", "compare"):
        return message
    sections = r"model\.(?:method\.)?" if command == "gradients" else r"(?:model|data)\."
    return re.sub(rf"(`|--){sections}", r"\1run." if command == "gradients" else r"\1", message)


def _run(name: str, arguments: list[str]) -> int:
    """Import a command, and only now what it needs: most need torch, which takes seconds."""
    if name in ("fit", "compare", "gradients"):
        arguments = with_files(name, arguments)
    with Console(stderr=True).status("starting"):  # on a terminal alone
        module: Any = importlib.import_module(f"dlmi.cli.{name}")
    if "torch" in sys.modules:
        from dlmi.lm.memory import keep_freed_memory
        from dlmi.run.full_disk import watch_threads

        keep_freed_memory()
        watch_threads()
    command = getattr(module, f"{name}_command", None) or module.make_parser().run
    code: int = command(arguments)
    return code


def _quieten() -> None:
    """Silence advice that does not concern the user of this program."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*LightningCLI's args parameter.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*No seed found, seed set to 0.*",  # every row holds it
    ):
        warnings.filterwarnings("ignore", message=message)
