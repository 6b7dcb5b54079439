"""Finds packaged configurations by name: `--config dlmi_tau100`."""

import re
from difflib import get_close_matches
from pathlib import Path

from dlmi.errors import InputError

# Part of the installed package; in a clone, a link to the folder at its top.
CONFIGS = (Path(__file__).parents[1] / "configs").resolve()
_OPTIONS = ("-c", "--config")


def with_files(command: str, arguments: list[str]) -> list[str]:
    """The arguments of a command, with names of configurations replaced by their paths."""
    found = list(arguments)
    for number, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if number and arguments[number - 1] in _OPTIONS:
            found[number] = _find(command, word)
        elif equals and option in _OPTIONS:
            found[number] = f"{option}={_find(command, value)}"
    return found


def _find(command: str, given: str) -> str:
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
