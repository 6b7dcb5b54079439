"""`python -m dlmi invert TEXT`: find the prompt of one text."""

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from dlmi.cli.output import check_new_file
from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError, first_line
from dlmi.invert_text import invert
from dlmi.invert_text.methods import METHOD_NAMES
from dlmi.invert_text.screen import print_advice, print_found, search_screen
from dlmi.lm.loading import PACKAGED

SOLVED, BEST_EFFORT = 0, 3  # exit codes


def invert_command(arguments: list[str]) -> int:
    """Search and print; returns 0 if the prompt makes the LM say the text, else 3."""
    options = make_parser().read(arguments)
    text = _read_text(options.pop("text"), options.pop("file"))
    options["template"] = _read_template(options["template"])
    as_json, save = options.pop("json"), options.pop("save")
    check_new_file(save, "--save")
    with search_screen() as show:
        row = invert(text=text, on_progress=show, **options)
    if save is not None:
        save.write_bytes((row.full_text or row.prompt_text).encode())
    if as_json:
        print(row.to_json_line(), end="")
    else:
        print_found(row)
    if not row.exact:
        print_advice(row, options)
    return SOLVED if row.exact else BEST_EFFORT


def make_parser() -> CommandParser:
    """The options."""
    usage = '"TEXT" [options]'
    elsewhere: set[str | int] = {"lm", "text", "method", "on_progress"}
    parser = CommandParser.of("invert", invert, usage, elsewhere)
    parser.description = (
        "Find the prompt after which the LM greedily says TEXT. Exit code 0: found; 3: not exact, "
        "also after Ctrl-C; 2: invalid input."
    )
    parser.add_argument(
        "text",
        nargs="?",
        type=str | None,
        default=None,
        help="What the LM is to say; `-`, or nothing, reads it from stdin. A text in the middle of "
        'a line usually starts with a space: " Paris.".',
    )
    parser.add_argument(
        "--method",
        default="SwapSearch",
        help=f"One of {', '.join(METHOD_NAMES)}, with settings for small budgets; `python -m dlmi "
        "fit --model.method.help METHOD` lists its `options`.",
    )
    parser.add_argument("--file", type=Path | None, default=None, help="A file with the text.")
    parser.add_argument("--lm", type=str, default=PACKAGED, help="As in `fit`'s `data`.")
    parser.add_argument(
        "--json", action="store_true", help="Print only the result row, as JSON, to stdout."
    )
    save = "A new file for the whole prompt, exactly as it is to be pasted."
    parser.add_argument("--save", type=Path | None, default=None, help=save)
    return parser


def _read_text(text: str | None, file: Path | None) -> str:
    """TEXT, or the content of a file or of stdin without its last newline."""
    if text is not None and file is not None:
        raise InputError("Expected TEXT or `--file`, but got both.")
    if text is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError(
            'Expected TEXT, such as python -m dlmi invert " Paris.", or `--file`, or a text on '
            "stdin, but got none."
        )
    source = "`--file`" if file else "TEXT" if text not in (None, "-") else "stdin"
    try:
        if source == "TEXT":
            found = os.fsencode(str(text)).decode()
        else:
            raw = file.read_bytes() if file else sys.stdin.buffer.read()
            found = raw.decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"Expected {source} to be readable UTF-8, but it is not ({error})."
        ) from error
    if not found.strip():
        raise InputError(f"Expected {source} to hold a text, but it is empty.")
    return found


def _read_template(template: Any) -> Any:
    """The template, or the content of the .json or .yaml file that it names."""
    if not isinstance(template, str) or not template.endswith((".json", ".yaml", ".yml")):
        return template
    try:
        return yaml.safe_load(Path(template).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(
            f"Expected `--template` to be a readable file of JSON or YAML, but got {template} "
            f"({first_line(error)})."
        ) from error
