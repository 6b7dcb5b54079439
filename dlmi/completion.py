"""`dlmi completion`: a script with which bash completes commands and options at a key press.

Importing the package takes seconds, too long to wait for at a key. So all words are written into
the script once; make it anew when the package is updated.
"""

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Mapping

from dlmi import methods
from dlmi.errors import InputError

_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][\w.]*")
_SCRIPT = """\
# Completion of dlmi for bash, made by `dlmi completion`. For now: source <(dlmi completion)
# For good:  dlmi completion > ~/.local/share/bash-completion/completions/dlmi
# In zsh:    autoload -U bashcompinit && bashcompinit && source <(dlmi completion)
_dlmi() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local words=""
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands} --help --version"
    elif [[ $before == --model ]]; then
        words="{methods}"
    elif [[ $word == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    else
        COMPREPLY=($(compgen -f -- "$word"))
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -F _dlmi dlmi
"""


def completion_script(commands: Mapping[str, Callable[[list[str]], int]]) -> str:
    """The script for these commands; their options are read from their own `--help`."""
    options = {name: _options(run) for name, run in commands.items()}
    for name in methods.__all__:
        parameters = inspect.signature(getattr(methods, name)).parameters
        options["fit"] |= {f"--model.{parameter}" for parameter in parameters}
    words = {name: " ".join(sorted(found)) for name, found in options.items()}
    cases = "\n".join(f'            {name}) words="{text}" ;;' for name, text in words.items())
    return _SCRIPT.format(
        commands=" ".join(commands), methods=" ".join(methods.__all__), cases=cases
    )


def _options(run: Callable[[list[str]], int]) -> set[str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run(["--help"])
    return set(_OPTION.findall(text.getvalue()))


def completion_command(arguments: list[str]) -> int:
    """Print the script."""
    from dlmi.cli import COMMANDS  # which this command is one of

    if arguments in (["-h"], ["--help"]):
        print("usage: python -m dlmi completion\n\nPrint a script for completion in bash.")
        return 0
    if arguments:
        raise InputError(f"Expected no options, but got {arguments[0]!r}. Leave them out.")
    others = {name: run for name, run in COMMANDS.items() if run is not completion_command}
    print(completion_script(others), end="")
    return 0
