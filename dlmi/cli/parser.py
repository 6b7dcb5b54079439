"""The parser of all commands: options from signatures, and errors of one line."""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Self

# lightning 2.6 still calls functions that jsonargparse 4.49 renamed; the user cannot change that.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, Namespace

from dlmi.cli.output import TEXTS
from dlmi.errors import InputError, find_input_error, first_line

# Former names of settings with the present ones, and the types of settings in words.
FORMER, _KINDS = TEXTS["former"], TEXTS["kinds"]
_CLASS_MODULES = {"trainer.logger": "loggers", "trainer.callbacks": "callbacks"}
_MOST_LEVELS, _MOST_ALIASES = 64, 20  # of YAML


class OptionError(ValueError):
    """A message of jsonargparse as it is; nested parsers add to it."""


class CommandParser(ArgumentParser):
    """A parser whose errors are `InputError`s of one line."""

    _command: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Abbreviated options would hide spelling mistakes.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    @classmethod
    def of(
        cls,
        command: str,
        signature: Callable[..., Any],
        usage: str = "[options]",
        skip: set[str | int] | None = None,
    ) -> Self:
        """A parser whose options are the parameters of a function or class, except `skip`."""
        name = f"python -m dlmi {command}"
        about = re.split(r"\n\n(?:Args|Attributes):", inspect.getdoc(signature) or "")[0]
        parser = cls(prog=name, usage=f"{name} {usage}", description=about)
        parser._command = signature
        if isinstance(signature, type):
            parser.add_class_arguments(signature, as_group=False, skip=skip)
        else:
            parser.add_function_arguments(signature, as_group=False, as_positional=True, skip=skip)
        for action in parser._actions:
            if getattr(action, "_typehint", None) in (bool, bool | None):
                action.nargs, action.const = "?", True  # `--option` alone is `--option true`
        return parser

    def read(self, arguments: list[str]) -> dict[str, Any]:
        """The options by name, with classes instantiated."""
        return dict(vars(self.instantiate_classes(self.parse_args(arguments))))

    def run(self, arguments: list[str]) -> int:
        """Call the function with the options; returns its exit code."""
        options = {k: v for k, v in self.read(arguments).items() if k != "config"}
        code: int = self._command(**options)
        return code

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """As the base class, but raises `InputError`."""
        with plain_errors(self):
            parsed: Namespace = super().parse_args(*args, **kwargs)
        return parsed

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """As the base class, with the name of the file in errors."""
        try:
            parsed: Namespace = super().parse_path(path, *args, **kwargs)
        except OptionError as error:
            _raise_yaml_problem(error, str(path))
            raise
        except UnicodeDecodeError as error:
            raise InputError(f"Expected {path} to be UTF-8, but it is not ({error}).") from error
        return parsed

    def validate(
        self,
        namespace: Namespace,
        skip_unset: bool = True,
        skip_required: bool = False,
        **kwargs: Any,
    ) -> None:
        """As the base class, but null is only valid for types that include None."""
        super().validate(namespace, skip_unset, skip_required, **kwargs)
        if not skip_required:
            super().validate(namespace, False, **kwargs)
            for name in self.groups or ():
                if namespace.get(name, self) is None:
                    raise InputError(f"Expected `{name}` to be a mapping, but got null.")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise instead of printing the usage."""
        raise OptionError(message) from ex


@contextlib.contextmanager
def plain_errors(parser: ArgumentParser | None, *others: type[Exception]) -> Iterator[None]:
    """Turn an `OptionError`, or another error caused by settings, into an `InputError`."""
    try:
        yield
    except (OptionError, *others) as error:  # type: ignore[misc]
        if (mistake := find_input_error(error)) is not None:
            raise mistake from error
        _raise_yaml_problem(error, f"`{'.'.join(_keys(str(error))) or 'config'}`")
        raise InputError(_plain(str(error), parser)) from error


def _raise_yaml_problem(error: BaseException | None, where: str) -> None:
    """Raise `InputError` if an error was caused by text that is not YAML."""
    while error is not None and not isinstance(error, yaml.YAMLError):
        error = error.__cause__
    if error is None:
        return
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or first_line(error)
    line = "" if mark is None else f"line {mark.line + 1}: "
    raise InputError(f"Expected {where} to be valid YAML, but {line}{problem}.") from error


def _plain(message: str, parser: ArgumentParser | None) -> str:
    """One line from a message of jsonargparse, which lists everything that it has tried."""
    keys = _keys(message)
    key = ".".join(keys)
    if parser is not None and (
        found := re.search(
            r"(?:Group '(\S+)' does not accept option|^ *Option) '([^']+)'|"
            r"unrecognized arguments: (?:--)?([^ =]+)",
            message,
            flags=re.M,
        )
    ):
        return _unknown(".".join([*keys, *filter(None, found.groups())]), parser)
    if found := re.search(r"arguments are required: ([^\s,]+)", message):
        missing = ".".join([*keys, found[1]])
        names = ", ".join(_class_names(missing))
        hint = f" Give one of {names}." if names else ""
        return f"Expected `{missing}` to be given, but it is not.{hint}"
    if found := re.search(r"Problem with given class_path '(?:\S+\.)?(\w+)':\s+(.+)", message):
        name, reason = found[1], found[2]
        if package := re.search(r"Requirement '(([\w.-]+).*?)' not met", reason):
            reason = f"{package[1]} is not installed. `pip install -U {package[2]}`."
        where = [f"`{option}` " for option in _CLASS_MODULES if name in _class_names(option)]
        return f"Expected {''.join(where)}{name} to be usable, but {reason}"
    given = re.findall(
        r"(?:Given value: |Got value: |path string: |load config ')(.*?)'?$", message, flags=re.M
    )
    if key and given:
        value = "null" if given[-1] == "None" else given[-1]
        now, close = FORMER.get(key) or FORMER.get(value), _closest(value, _class_names(key))
        hint = f" It is now `{now}`." if now else f" Did you mean {close}?" if close else ""
        return f"Expected `{key}` to be {_kinds(message, key)}, but got {value}.{hint}"
    text = re.sub(r'Parser key "[^"]+":', "", message)
    return f"{f'`{key}`: ' if key else ''}{' '.join(text.split())}"[:400]


def _keys(message: str) -> list[str]:
    """The option that a message is about, and those within it."""
    head = re.split(r"^ *- ", message, maxsplit=1, flags=re.M)[0]
    return [key for key in re.findall(r'Parser key "([^"]+)"', head) if key != "config"]


def _kinds(message: str, key: str) -> str:
    """The types that a message lists, in words; a mapping where it lists none."""
    listed = re.findall(
        r"Expected an? (?:<class '(?:.*\.)?(\w+)'>|typing\.Literal\[(.*)\]|dot import)", message
    )
    names = ", ".join(_class_names(key))
    kinds = [
        _KINDS.get(kind, kind)
        or literals.replace(", ", " or ")
        or (f"one of {names}" if names else "the name of a class")
        for kind, literals in listed
        if kind != "NoneType"
    ]
    return " or ".join(dict.fromkeys(kinds)) or "a mapping"


def _unknown(key: str, parser: ArgumentParser) -> str:
    """The message for an unknown option, with a suggestion."""
    section, _, last = key.rpartition(".")
    known = known_options(parser)
    owner = known.pop(key, "")
    moved = [name for name in known if name.rpartition(".")[2] == last]
    close = _closest(key, moved, 0) or _closest(key, known)
    hint = f"It is an option of {owner}. " if owner else ""
    if new := FORMER.get(f"{key.partition('.')[0]}.{last}" if section else key):
        hint += f"It is now `{new}`. "
    elif close:
        of = f" of {known[close]}" if known[close] else ""
        hint += f"Did you mean `{close}`{of}? "
    helps = f"`{parser.prog} --help` lists them"
    if key.startswith("model."):
        helps += f", `{parser.prog} --model.method.help METHOD` those of a method"
    return f"Expected options that exist, but got `{key}`. {hint}{helps}."


def _closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, 1, cutoff)), None)


def known_options(parser: ArgumentParser) -> dict[str, str]:
    """All options, each with the method or source of targets that it belongs to, if any."""
    known = {action.dest: "" for action in parser._actions}
    for place in ("model.method", "data.targets"):
        for cls in classes_of(place) if place in known else ():
            for field in dataclasses.fields(cls):
                known.setdefault(f"{place}.{field.name}", cls.__name__)
    return known


def classes_of(key: str) -> list[Any]:
    """The classes of this package that an option takes by their short names."""
    if key.startswith("model.method"):
        from dlmi import methods  # only now: it imports torch

        return [getattr(methods, name) for name in methods.__all__]
    if key == "data.targets":
        from dlmi.targets import sources

        return [sources.ByRank, sources.File, sources.Texts, sources.Questions]
    return []


def _class_names(key: str) -> list[str]:
    """The short names of classes that an option takes, also of Lightning's own."""
    if key in _CLASS_MODULES:
        return list(importlib.import_module(f"lightning.pytorch.{_CLASS_MODULES[key]}").__all__)
    return [cls.__name__ for cls in classes_of(key)]


_load_yaml = jsonargparse.get_loader("yaml")


def _load_checked_yaml(text: str) -> Any:
    """Load YAML, but not what would crash the C loader or stand for millions of values."""
    open_anchors: list[str | None] = []
    aliases, is_cyclic = 0, False
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            is_cyclic = event.anchor in open_anchors
        if is_cyclic or len(open_anchors) > _MOST_LEVELS or aliases > _MOST_ALIASES:
            raise yaml.YAMLError(
                f"it is nested too deeply (more than {_MOST_LEVELS} levels), refers to itself or "
                f"has more than {_MOST_ALIASES} aliases"
            )
    return _load_yaml(text)


jsonargparse.set_loader("yaml", _load_checked_yaml, exceptions=(yaml.YAMLError,))
