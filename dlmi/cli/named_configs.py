"""Finds packaged configurations by name: `--config dlmi_tau100`."""

import difflib
import re
from pathlib import Path

from dlmi.errors import InputError

# Part of the installed package; in a clone, a link to the folder at its top.
CONFIGS = (Path(__file__).parents[1] / "configs").resolve()


def with_files(command: str, arguments: list[str]) -> list[str]:
    """The arguments of a command, with names of configurations replaced by their paths."""
    found, is_next = [], False
    for word in arguments:
        option, equals, value = word.partition("=")
        if is_next:
            found.append(_find(command, word))
        elif equals and option in ("-c", "--config"):
            found.append(f"{option}={_find(command, value)}")
        else:
            found.append(word)
        is_next = word in ("-c", "--config")
    return found


def _find(command: str, given: str) -> str:
    """The path of a packaged configuration; an existing file and inline YAML stay as they are."""
    if not re.fullmatch(r"[\w./~-]+", given) or Path(given).exists():
        return given
    name = given.removeprefix("configs/").removesuffix(".yaml")
    for candidate in (name, f"{command}/{name}"):
        if (CONFIGS / f"{candidate}.yaml").is_file():
            return str(CONFIGS / f"{candidate}.yaml")
    others = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.*")}
    of_command = difflib.get_close_matches(f"{command}/{name}", others, 1, 0.8)
    close = of_command or difflib.get_close_matches(name, others, 1, 0.8)
    hint = f"Did you mean `{close[0]}`?" if close else f"They are in {CONFIGS}."
    raise InputError(
        f"Expected `config` to be a file, or the name of one that comes with dlmi, but got "
        f"{given!r}. {hint}"
    )
