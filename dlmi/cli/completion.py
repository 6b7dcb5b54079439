"""`dlmi completion`: a script for Tab completion in bash.

All words are in the script, so that Tab starts no Python. Make it again after an update.
"""

import importlib
from pathlib import Path
from typing import Any, get_args

from jinja2 import Template

from dlmi.cli.main import COMMANDS
from dlmi.cli.parser import CommandParser, classes_of, known_options


def make_parser() -> CommandParser:
    """No options."""
    return CommandParser.of("completion", completion, usage="")


def completion() -> int:
    """Print a script for Tab completion in bash: source <(dlmi completion)."""
    values, options = {}, {}
    for name in COMMANDS:
        parser = importlib.import_module(f"dlmi.cli.{name}").make_parser()
        words = {word for action in parser._actions for word in action.option_strings}
        words |= {f"--{key}" for key, owner in known_options(parser).items() if owner}
        options[name] = sorted(words)
        for action in parser._actions:
            classes = [cls.__name__ for cls in classes_of(action.dest)]
            if found := classes or _literals(getattr(action, "_typehint", None)):
                values[f"{name} --{action.dest}"] = found
    script = Path(__file__).with_name("completion.bash.j2").read_text(encoding="utf-8")
    print(Template(script, trim_blocks=True).render(values=values, options=options))
    return 0


def _literals(hint: Any) -> list[str]:
    """The words that a type allows.

    >>> from typing import Literal
    >>> _literals(Literal["a", "b"] | None), _literals(bool)
    (['a', 'b'], ['true', 'false'])
    """
    if hint is bool:
        return ["true", "false"]
    return [word for a in get_args(hint) for word in ([a] if isinstance(a, str) else _literals(a))]
