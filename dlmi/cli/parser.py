"""What the parsers of all commands have in common: errors of one line, in plain English."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, Namespace

from dlmi.cli.spellings import CLASSES, COMMANDS, method_names, method_settings, new_spelling
from dlmi.errors import InputError, find_input_error

if TYPE_CHECKING:  # some commands need no torch, and start without it
    import torch

_DEEPEST, _MOST_VALUES = 64, 100_000  # levels and values of YAML
_SOURCES = ["ByRank", "File", "Texts", "Questions"]
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
}


class OptionError(ValueError):
    """What jsonargparse says of options, in its own words; parsers within parsers add to it."""


@contextlib.contextmanager
def plain_errors(parser: ArgumentParser) -> Iterator[None]:
    """Turn what a parser refuses into an `InputError` of one line."""
    try:
        yield
    except OptionError as error:
        raise find_input_error(error) or InputError(plain(str(error), parser)) from error


class CommandParser(ArgumentParser):
    """The parser of a command beside `fit`."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """As the base class, but for `null`, which that takes for a value of any type."""
        with plain_errors(self):
            config: Namespace = super().parse_args(*args, **kwargs)
        for name, default in self.get_defaults().items():
            if default is not None and config.get(name) is None:
                raise InputError(f"Expected `{name}` to have a value, but got null. Leave it out.")
        return config

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise it."""
        raise OptionError(message) from ex


def plain(message: str, parser: ArgumentParser) -> str:
    """A message of jsonargparse in plain English, with the way out.

    Args:
        message: Several lines: the way to the setting, then all that was tried.
        parser: Who says so.
    """
    head = re.split(r"^ *- ", message, maxsplit=1, flags=re.M)[0]
    keys = [key for key in re.findall(r'Parser key "([^"]+)"', head) if key != "config"]
    key = ".".join(keys)
    if found := re.search(r"(?:Subcommand|Group) '\S+' does not accept option '([^']+)'", message):
        group = re.search(r"Group '(\S+)'", message)
        return _unknown(f"{group[1]}.{found[1]}" if group else found[1], parser)
    if found := re.search(r"Option '([^']+)' is not accepted", message):
        return _unknown(".".join([*keys, found[1]]), parser)
    if found := re.search(r"unrecognized arguments: (?:--)?([^ =]+)", message):
        return _unknown(found[1], parser)
    if found := re.search(r"arguments are required: (\S+)", message):
        return _missing(found[1])
    if key == "model" and (found := re.search(r"Unable to load config '([^']*)'", message)):
        return _method_as_model(found[1])
    if found := re.search(r"Expected a dot import path string: (.*)", message):
        if key.startswith("model.method"):
            return _unknown_class(key, found[1], "a method", method_names())
        if key == "data.targets":
            return _unknown_class(key, found[1], "a source of targets", _SOURCES)
    return _wrong_value(key, message)


def _renamed(old: str, new: str) -> str:
    return f"Expected settings by their present names, but got `{old}`, which is now `{new}`."


def _unknown(key: str, parser: ArgumentParser) -> str:
    """No such setting: it has another name now, or it is misspelt."""
    is_fit = any(action.dest == "model.method" for action in parser._actions)
    known = [action.dest for action in parser._actions]
    if is_fit and (new := new_spelling(key)):
        return _renamed(key, new)
    if not is_fit and (new := COMMANDS.get(key)) in known:
        return _renamed(f"--{key}", f"--{new}")
    known += [f"model.method.{name}" for name in method_settings()] if is_fit else []
    close = difflib.get_close_matches(key, [name for name in known if name != key], n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    if is_fit:
        hint += (
            " `python -m dlmi fit --help` lists them, `python -m dlmi fit --model.method.help "
            "METHOD` those of a method."
        )
    return f"Expected options that exist, but got `{key}`.{hint}"


def _missing(name: str) -> str:
    if name.removeprefix("fit.") == "model.method":
        return (
            "Expected a method, but got none. Give `--config configs/quickstart.yaml`, or "
            f"`--model.method` with one of: {', '.join(method_names())}."
        )
    return f"Expected `{name}` to be given, but it is not."


def _method_as_model(given: str) -> str:
    """`--model DLMI`, as it was."""
    name = CLASSES.get(given, given)
    if name in method_names():
        return _renamed(f"model {given}", f"model.method {name}")
    return (
        f"Expected `model` to be the settings of a run, but got {name!r}. A method is named by "
        f"`model.method`: {', '.join(method_names())}."
    )


def _unknown_class(key: str, name: str, what: str, names: list[str]) -> str:
    if name in CLASSES:
        return _renamed(f"{key} {name}", f"{key} {CLASSES[name]}")
    return f"Expected `{key}` to be {what} ({', '.join(names)}), but got {name!r}."


def _wrong_value(key: str, message: str) -> str:
    """A setting whose value is of another type, or whatever else is wrong."""
    tried = re.findall(r"Expected an? (.+?)(?:\. Got value: (.*))?$", message, flags=re.M)
    kinds = [kind for kind, _ in tried if not re.search(r"NoneType|^path|^dot import", kind)]
    given = re.findall(r"Given value: (.*)", message) or [value for _, value in tried if value]
    if not key or not kinds or not given:
        lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
        text = re.sub(r'Parser key "[^"]+": ?', "", " ".join(lines))
        where = f"`{key}`: " if key else ""
        return f"{where}{text}"[:400]
    kinds = list(dict.fromkeys(map(_kind, kinds)))
    return f"Expected `{key}` to be {' or '.join(kinds)}, but got {given[-1]}."


def _kind(kind: str) -> str:
    """A type as a reader says it."""
    if found := re.match(r"typing\.Literal\[(.*)\]", kind):
        return found[1].replace(", ", " or ")
    found = re.match(r"<class '(?:.*\.)?(\w+)'>", kind)
    name = found[1] if found else kind
    return _KINDS.get(name, name)


def refuse_endless_yaml() -> None:
    """Have jsonargparse refuse YAML that would crash Python, or that stands for too many values."""
    load_safely = jsonargparse.get_loader("yaml")

    def load(text: str) -> Any:
        _check_yaml(text)
        return load_safely(text)

    if load_safely.__module__ != __name__:  # once is enough
        jsonargparse.set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def _check_yaml(text: str) -> None:
    """Raise `YAMLError` for text that nests too deeply, refers to itself or is a bomb of aliases.

    >>> _check_yaml("a: &a [*a]")
    Traceback (most recent call last):
    yaml.error.YAMLError: the node `a` refers to itself
    """
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and how many values there were before
    sizes: dict[str | None, int] = {}
    values = 0  # with every alias written out
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, values))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor] = values - before
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_nodes):
                raise yaml.YAMLError(f"the node `{event.anchor}` refers to itself")
            values += sizes.get(event.anchor, 1)
        values += isinstance(event, yaml.NodeEvent)
        if len(open_nodes) > _DEEPEST:
            raise yaml.YAMLError(f"it is nested too deeply, by more than {_DEEPEST} levels")
        if values > _MOST_VALUES:
            raise yaml.YAMLError(f"it stands for more than {_MOST_VALUES:,} values")


def check_new_file(out: Path) -> None:
    """Raise `InputError` unless `--out` can be written without overwriting anything."""
    if os.path.lexists(out):  # a link that leads nowhere too
        raise InputError(f"Expected `--out` to be a new file, but {out} exists.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"Expected `--out` to be in an existing folder, but got {out}.")


def default_device() -> "torch.device":
    """The accelerator if there is one, else the CPU."""
    import torch

    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return torch.device("cpu") if accelerator is None else accelerator
