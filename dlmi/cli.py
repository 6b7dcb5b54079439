"""The command line: `fit` through LightningCLI, the other commands beside it.

Every mistake of the user ends in one line and exit code 2; Ctrl-C ends in exit code 130.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from dlmi.bench import bench_command
from dlmi.commands import targets_command, verify_command
from dlmi.compare import compare_command
from dlmi.completion import completion_command
from dlmi.config_files import screen_yaml_files
from dlmi.display import visible
from dlmi.errors import RunStopped, input_error_behind, run_stopped_behind
from dlmi.fit import fit_command
from dlmi.full_disk import watch_threads
from dlmi.gradients.command import gradients_command
from dlmi.invert_text.command import invert_command
from dlmi.memory import keep_freed_memory
from dlmi.prompt_engineering.command import score_command
from dlmi.report.command import report_command
from dlmi.version import __version__

HELP = """\
usage: python -m dlmi COMMAND [options]

Find the prompt that makes a frozen language model say exactly this.

commands:
  invert    find the prompt of one text: python -m dlmi invert " Paris."
  fit       invert a queue of targets:   python -m dlmi fit --config configs/quickstart.yaml
  targets   write targets to a file:     python -m dlmi targets --out targets.jsonl
  verify    decode found prompts again:  python -m dlmi verify lightning_logs/version_0
  compare   run a grid of methods:       python -m dlmi compare --config configs/compare/small.yaml
  score     right answers of prompts:    python -m dlmi score --prompt " Think first."
  report    figures, tables and a page:  python -m dlmi report lightning_logs --out report
  bench     how fast it is, here:        python -m dlmi bench
  gradients bias, variance of gradients: python -m dlmi gradients -c configs/gradients/small.yaml
  completion  options at a key press:    source <(dlmi completion)

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
    watch_threads()
    screen_yaml_files()
    try:
        sys.exit(COMMANDS[command](arguments[1:]))
    except UnicodeDecodeError as error:
        fail(f"Expected files of UTF-8 text, but one is not ({error}).")
    except ValueError as error:
        fail(str(input_error_behind(error)))
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


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "invert": invert_command,
    "fit": fit_command,
    "targets": targets_command,
    "verify": verify_command,
    "compare": compare_command,
    "score": score_command,
    "report": report_command,
    "bench": bench_command,
    "gradients": gradients_command,
    "completion": completion_command,
}


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
