"""`python -m dlmi invert TEXT`: the prompt of one text, on the command line."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

from dlmi.commands import CommandParser, default_device
from dlmi.errors import InputError
from dlmi.invert_text.request import SearchRequest
from dlmi.invert_text.screen import SearchScreen, print_found
from dlmi.models import PACKAGED, load_lm
from dlmi.placement import DType
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens

SOLVED, BEST_EFFORT = 0, 3  # exit codes
_REQUEST_OPTIONS = (
    *("prompt_length", "method", "options", "seconds", "steps", "restarts", "seed"),
    *("allowed_tokens", "forbid_target_tokens", "template", "chat"),
)


def invert_command(arguments: list[str]) -> int:
    """Exit code 0 if the prompt makes the LM say the text, 3 if it only comes close."""
    config = _parser().parse_args(arguments)
    request = SearchRequest(
        [_read_text(config.text, config.file)],
        **{name: config[name] for name in _REQUEST_OPTIONS},
    )
    lm = load_lm(config.lm, config.dtype, default_device())
    with SearchScreen(lm) as screen:
        [found] = request.search(lm, screen.show).run()
    if config.json:
        print(json.dumps(found.to_json()))
    else:
        print_found(lm, found)
    return SOLVED if found.exact else BEST_EFFORT


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m dlmi invert",
        usage='python -m dlmi invert "TEXT" [options]',
        description=(
            "Find the prompt after which the LM greedily says TEXT. Exit code 0: found; 3: only "
            "the best effort, also after Ctrl-C; 2: a mistake in the input."
        ),
    )
    parser.add_argument(
        "text",
        nargs="?",
        type=str,
        default=None,
        help="What the LM is to say; `-`, or nothing, reads it from stdin. Most texts that go on "
        'in the middle of a line start with a space: " Paris.".',
    )
    parser.add_argument("--file", type=Path | None, default=None, help="A file with the text.")
    parser.add_argument("--lm", type=str, default=PACKAGED, help="As in `fit`'s `data`.")
    parser.add_argument("--dtype", type=DType, default="auto", help="As in `fit`'s `data`.")
    parser.add_argument(
        "--prompt_length",
        type=int | Literal["auto"],
        default="auto",
        help="Tokens of the prompt; `auto` tries 4, 8, 16 and 32, each with its share of the "
        "budget, until one works.",
    )
    parser.add_argument(
        "--method", type=str, default="EchoSearch", help="A method, as `fit`'s `model`."
    )
    parser.add_argument(
        "--options", type=dict[str, Any], default={}, help="Its options: '{\"search_width\": 128}'."
    )
    parser.add_argument(
        "--seconds",
        type=float | None,
        default=None,
        help="Budget of time. 120, unless there are `--steps`.",
    )
    parser.add_argument(
        "--steps", type=int | None, default=None, help="Budget of steps for each start."
    )
    parser.add_argument(
        "--restarts", type=int, default=1, help="Starts side by side; the first exact one ends all."
    )
    parser.add_argument("--seed", type=int, default=0, help="Fixes the noise.")
    parser.add_argument(
        "--allowed_tokens",
        type=AllowedTokens,
        default="round_trip",
        help="As in `fit`'s `model`. The default keeps to prompts that survive being pasted.",
    )
    parser.add_argument(
        "--forbid_target_tokens",
        type=ForbiddenTokens,
        default="none",
        help="As in `fit`'s `model`: `none`, the text's `ids`, or its `words`.",
    )
    parser.add_argument(
        "--template",
        type=str | None,
        default=None,
        help='Text around the prompt, with {slot} where its tokens go: "Q:{slot} A:".',
    )
    parser.add_argument(
        "--chat", type=bool, default=False, help="Make it a message to a chat model, as in `fit`."
    )
    parser.add_argument(
        "--json", action="store_true", help="One JSON object on stdout, and nothing else there."
    )
    return parser


def _read_text(text: str | None, file: Path | None) -> str:
    """TEXT, or a file, or stdin; the newline that ends a file is not part of the text."""
    if text is not None and file is not None:
        raise InputError("Expected TEXT or `--file`, but got both.")
    if text is not None and text != "-":
        source, raw = "TEXT", text.encode("utf-8", "surrogateescape")
    elif file is not None:
        source = "`--file`"
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise InputError(
                f"Expected `--file` to be a readable file, but got {file} ({error.strerror})."
            ) from error
    elif text is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError(
            'Expected TEXT, such as python -m dlmi invert " Paris.", or `--file`, or a text on '
            "stdin, but got none."
        )
    else:
        source, raw = "stdin", sys.stdin.buffer.read()
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"Expected {source} to be UTF-8, but it is not ({error}).") from error
    if source != "TEXT":
        decoded = decoded.removesuffix("\n").removesuffix("\r")
    if not decoded.strip():
        raise InputError(f"Expected {source} to hold a text, but it is empty.")
    return decoded
