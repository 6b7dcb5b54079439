"""Files of JSON lines that anyone may have written: every value is checked before it is used."""

import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dlmi.errors import InputError

_LARGEST_INTEGER = 2**63  # what a tensor and every reader of JSON can hold
_DEEPEST = 16  # lists within lists of a free-form value; Python's own limit ends in a crash
_LONGEST_QUOTE = 80

_T = TypeVar("_T")
_Reader = Callable[[Any], Any]


class _WrongType(Exception):
    """Says what was expected, and what came."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, those without content left out.

    Only a newline ends a line: JSON may hold any other separator (U+2028, form feed) as text.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line


def parse_object(line: bytes) -> dict[str, Any]:
    """One JSON object.

    Raises:
        InputError: For anything else, however it is broken.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"it is not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise InputError("it is not UTF-8") from error
    except RecursionError as error:
        raise InputError("it is nested too deeply") from error
    except ValueError as error:  # Python refuses to read integers of thousands of digits
        raise InputError("it holds a number that is too long") from error
    if not isinstance(value, dict):
        raise InputError("it is not a JSON object")
    return value


def read_json_file(path: Path) -> dict[str, Any] | None:
    """The JSON object that is a file's content; None where there is no such file."""
    if not path.is_file():  # a pipe by that name would be waited for without end
        return None
    try:
        return parse_object(path.read_bytes())
    except (OSError, InputError):
        return None


def build(kind: Callable[..., _T], row: dict[str, Any]) -> _T:
    """A dataclass from a JSON object, each field of the type that it is declared with.

    Lists become tuples where those are declared, whole numbers floats, and null is NaN where a
    number is declared. Further keys are ignored.

    Raises:
        InputError: Where a field is missing or of another type.
    """
    try:
        made: _T = _reader(kind)(row)
    except _WrongType as error:
        raise InputError(str(error)) from error
    return made


@functools.cache
def _reader(annotation: Any) -> _Reader:
    """What turns a JSON value into a value of this type, or raises `_WrongType`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return _dataclass_reader(annotation)
    if origin in (Union, types.UnionType):
        [inner] = [_reader(a) for a in arguments if a is not types.NoneType]
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _tuple_reader(_reader(arguments[0]))
    if origin is dict:
        return _dict_reader(_reader(arguments[1]))
    return {str: _text, bool: _truth, int: _integer, float: _number, Any: _free}[annotation]


def _dataclass_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    fields = [
        (field.name, _reader(hints[field.name]), field.default is dataclasses.MISSING)
        for field in dataclasses.fields(kind)
    ]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        values = {}
        for name, read_field, is_required in fields:
            if name in value:
                try:
                    values[name] = read_field(value[name])
                except _WrongType as error:
                    raise _WrongType(f"`{name}`: {error}") from None
            elif is_required:
                raise _WrongType(f"`{name}` is missing")
        return kind(**values)

    return read


def _tuple_reader(read_item: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong("a list", value)
        return tuple(map(read_item, value))

    return read


def _dict_reader(read_item: _Reader) -> _Reader:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        return {_text(name): read_item(item) for name, item in value.items()}

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("a text", value)
    # Half of a pair of surrogates is JSON, but no file can hold it afterwards.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise _wrong("a text in Unicode", value)
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise _wrong("a whole number of 64 bits", value)
    return value


def _number(value: Any) -> float:
    if value is None:  # how rows write a number that is none, for which JSON has no word
        return math.nan
    return value if type(value) is float else float(_integer(value))


def _free(value: Any, depth: int = 0) -> Any:
    """A value of no declared type: settings are whatever a method has."""
    if depth > _DEEPEST:
        raise _WrongType("it is nested too deeply")
    if isinstance(value, list):
        return [_free(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_text(name): _free(item, depth + 1) for name, item in value.items()}
    if isinstance(value, str):
        return _text(value)
    return _integer(value) if type(value) is int else value


def _wrong(expected: str, value: Any) -> _WrongType:
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST_QUOTE else f"{shown[:_LONGEST_QUOTE]}..."
    return _WrongType(f"expected {expected}, but got {shown}")
