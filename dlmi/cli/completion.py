"""`dlmi completion`: a script for Tab completion in bash.

All words are in the script, so that Tab starts no Python. Make it again after an update.
"""

import importlib
from typing import Any, get_args

from dlmi.cli.main import COMMANDS
from dlmi.cli.parser import CommandParser, classes_of, known_options

_SCRIPT = """\
# Completion of dlmi for bash, made by `dlmi completion`. For now: source <(dlmi completion)
# For good:  dlmi completion > ~/.local/share/bash-completion/completions/dlmi
# In zsh:    autoload -U bashcompinit && bashcompinit && source <(dlmi completion)
_dlmi() {{
  local words="" here="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if ((COMP_CWORD == 1)); then words="{commands} --help --version"; fi
  case "${{COMP_WORDS[1]}} $before" in
{values}
  esac
  if [[ $COMP_CWORD -gt 1 && $here == -* ]]; then case "${{COMP_WORDS[1]}}" in
{options}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$here"))
}}
complete -o default -F _dlmi dlmi  # file names where no word fits
"""


def make_parser() -> CommandParser:
    """No options."""
    return CommandParser.of("completion", completion, usage="")


def completion() -> int:
    """Print a script for Tab completion in bash: source <(dlmi completion)."""
    values, options = [], []
    for name in COMMANDS:
        parser = importlib.import_module(f"dlmi.cli.{name}").make_parser()
        words = {word for action in parser._actions for word in action.option_strings}
        words |= {f"--{key}" for key, owner in known_options(parser).items() if owner}
        options.append(f'    {name}) words="{" ".join(sorted(words))}";;')
        for action in parser._actions:
            names = [cls.__name__ for cls in classes_of(action.dest)]
            if found := names or _literals(getattr(action, "_typehint", None)):
                values.append(f'    "{name} --{action.dest}") words="{" ".join(found)}";;')
    cases = {"values": "\n".join(values), "options": "\n".join(options)}
    print(_SCRIPT.format(commands=" ".join(COMMANDS), **cases), end="")
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
