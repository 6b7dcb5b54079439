"""What the parsers of all commands have in common: errors of one line, in plain English."""

import contextlib
import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

# lightning 2.6 still calls functions that jsonargparse 4.49 renamed; the user cannot change that.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, Namespace

from dlmi.errors import InputError, find_input_error

# Settings that have another name now: refused, with the new one in the same line. Those that have
# moved, or are nearly the same, need no entry: they are found like a misspelt one.
FORMER = {
    "EchoSearch": "SwapSearch",
    "model.class_path": "model.method",
    "model.init": "model.method.first_prompt",
    "model.start": "model.method.start_from",
    "model.starts": "model.method.num_starts",
    "model.refine_after": "model.method Refined, with model.method.first and model.method.after",
    "model.allow_non_ascii": "model.allowed_tokens all",
    "data.targets_file": "data.targets File, with data.targets.path",
    "data.examples_per_step": "data.share.per_step",
    "data.eval_examples": "data.share.evaluated",
    "data.held_out_file": "data.share.held_out",
    "data.questions": "data.targets Questions, with data.targets.source",
    "data.max_questions": "data.targets.limit",
    "target_seed": "seed",
    "targets_file": "file",
}

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "tuple": "a list",
    "Iterable": "a list",
    "dict": "a mapping",
}
_DEEPEST, _MOST_VALUES = 64, 100_000  # levels and values of YAML


class OptionError(ValueError):
    """What jsonargparse says of options, in its own words; parsers within parsers add to it."""


class CommandParser(ArgumentParser):
    """A parser whose errors are `InputError`s of one line."""

    _command: Callable[..., Any]

    @classmethod
    def of(
        cls,
        command: str,
        signature: Callable[..., Any],
        usage: str = "[options]",
        skip: set[str | int] | None = None,
    ) -> Self:
        """A parser whose options are the parameters of a function or class.

        Args:
            command: Its name.
            signature: The function or class; its docstring is the help.
            usage: What stands behind the command's name.
            skip: Parameters that are no options.
        """
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
        """The options by name, made into what they stand for."""
        return dict(vars(self.instantiate_classes(self.parse_args(arguments))))

    def run(self, arguments: list[str]) -> int:
        """Call the function with the options; its exit code."""
        options = {k: v for k, v in self.read(arguments).items() if k != "config"}
        code: int = self._command(**options)
        return code

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """As the base class, with errors in plain English."""
        with plain_errors(self):
            parsed: Namespace = super().parse_args(*args, **kwargs)
        return parsed

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """As the base class; YAML that is none is told with the name of its file."""
        try:
            parsed: Namespace = super().parse_path(path, *args, **kwargs)
        except OptionError as error:
            raise OptionError(str(error).replace("<unicode string>", str(path))) from error
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
        """As the base class, and then once more: it takes null for a value of any type."""
        super().validate(namespace, skip_unset, skip_required, **kwargs)
        if not skip_required:
            super().validate(namespace, False, **kwargs)
            for name in self.groups or ():
                if namespace.get(name, self) is None:
                    raise InputError(f"Expected `{name}` to be a mapping, but got null.")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise it."""
        raise OptionError(message) from ex


@contextlib.contextmanager
def plain_errors(parser: ArgumentParser | None, *others: type[Exception]) -> Iterator[None]:
    """Turn what a parser refuses, and other errors that settings can cause, into `InputError`."""
    try:
        yield
    except (OptionError, *others) as error:  # type: ignore[misc]
        raise find_input_error(error) or InputError(_plain(str(error), parser)) from error


def _plain(message: str, parser: ArgumentParser | None) -> str:
    """A message of jsonargparse (the way to the setting, then all that was tried) in one line."""
    head = re.split(r"^ *- ", message, maxsplit=1, flags=re.M)[0]
    keys = [key for key in re.findall(r'Parser key "([^"]+)"', head) if key != "config"]
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
        names = f" Give {_class(missing)}." if classes_of(missing) else ""
        return f"Expected `{missing}` to be given, but it is not.{names}"
    if found := re.search(r"Problem with given class_path '([^']+)':\s+(.+)", message):
        return f"Expected {found[1]} to be of use here, but it is not: {found[2]}"
    if found := re.search(r"Unable to load config '([^']*)'", message):
        new = f"{key}.method {FORMER.get(found[1], found[1])}"
        hint = f" It is now `{new}`." if key == "model" else ""
        return f"Expected `{key}` to be a mapping, but got `{key} {found[1]}`.{hint}"
    tried = re.findall(
        r"(?:Expected an?|Not a valid subclass of) (.+?)(?:(?:\. Got value)?: (.*))?$",
        message,
        flags=re.M,
    )
    kinds = [_kind(kind, key) for kind, _ in tried if not re.search("NoneType|^path", kind)]
    given = re.findall(r"Given value: (.*)", message) or [value for _, value in tried if value]
    if key and kinds and given:
        new = f" It is now `{FORMER[given[-1]]}`." if given[-1] in FORMER else ""
        value = "null" if given[-1] == "None" else given[-1]
        return f"Expected `{key}` to be {' or '.join(dict.fromkeys(kinds))}, but got {value}.{new}"
    text = re.sub(r'Parser key "[^"]+":', "", message)
    return f"{f'`{key}`: ' if key else ''}{' '.join(text.split())}"[:400]


def _unknown(key: str, parser: ArgumentParser) -> str:
    """No such option: it is that of another class, or has another name now, or is misspelt."""
    section, _, last = key.rpartition(".")
    known = known_options(parser)
    owner = known.pop(key, "")
    moved = [name for name in known if name.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key, moved, 1, 0) or difflib.get_close_matches(key, known, 1)
    hint = f"It is one of {owner}. " if owner else ""
    if new := FORMER.get(f"{key.partition('.')[0]}.{last}" if section else key):
        hint += f"It is now `{new}`. "
    elif close:
        of = f" of {known[close[0]]}" if known[close[0]] else ""
        hint += f"Did you mean `{close[0]}`{of}? "
    helps = f"`{parser.prog} --help` lists them"
    if key.startswith("model."):
        helps += f", `{parser.prog} --model.method.help METHOD` those of a method"
    return f"Expected options that exist, but got `{key}`. {hint}{helps}."


def known_options(parser: ArgumentParser) -> dict[str, str]:
    """All options, and whose they are, where it is a method or a source of targets."""
    known = {action.dest: "" for action in parser._actions}
    for place in ("model.method", "data.targets"):
        for cls in classes_of(place) if place in known else ():
            for field in dataclasses.fields(cls):
                known.setdefault(f"{place}.{field.name}", cls.__name__)
    return known


def classes_of(key: str) -> list[Any]:
    """What may stand under a key by its name alone."""
    if key.startswith("model.method"):
        from dlmi import methods  # only now: it brings torch

        return [getattr(methods, name) for name in methods.__all__]
    if key == "data.targets":
        from dlmi.targets import sources

        return [sources.ByRank, sources.File, sources.Texts, sources.Questions]
    return []


def _class(key: str) -> str:
    names = [cls.__name__ for cls in classes_of(key)]
    return f"one of {', '.join(names)}" if names else "the name of a class"


def _kind(kind: str, key: str) -> str:
    """A type as a reader says it."""
    if found := re.match(r"typing\.Literal\[(.*)\]", kind):
        return found[1].replace(", ", " or ")
    if found := re.match(r"<class '(?:.*\.)?(\w+)'>", kind):
        return _KINDS.get(found[1], found[1])
    return _class(key)


_load_yaml = jsonargparse.get_loader("yaml")


def _load_checked_yaml(text: str) -> Any:
    """Refuse what would crash Python, or stands for too many values.

    >>> _load_checked_yaml("a: &a [*a]")
    Traceback (most recent call last):
    yaml.error.YAMLError: it refers to itself, or stands for more than 100,000 values
    """
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and how many values there were before
    sizes: dict[str | None, int] = {}
    values = 0  # with every alias written out
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, values))
            sizes[event.anchor] = _MOST_VALUES  # until it ends
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor] = values - before
        elif isinstance(event, yaml.AliasEvent):
            values += sizes.get(event.anchor, 0)
        values += 1
        if len(open_nodes) > _DEEPEST:
            raise yaml.YAMLError(f"it is nested too deeply, by more than {_DEEPEST} levels")
        if values > _MOST_VALUES:
            raise yaml.YAMLError(
                f"it refers to itself, or stands for more than {_MOST_VALUES:,} values"
            )
    return _load_yaml(text)


jsonargparse.set_loader("yaml", _load_checked_yaml, exceptions=(yaml.YAMLError,))
