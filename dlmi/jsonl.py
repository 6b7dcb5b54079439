"""Reads and writes JSON lines; since files may come from anyone, every value is checked."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dlmi.errors import InputError, RunStopped

_LARGEST_INTEGER = 2**63  # of a tensor
_DEEPEST = 16  # lists within lists

_T = TypeVar("_T")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers.

    Only a newline ends a line: JSON may contain other separators (U+2028, form feed) as text.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object on a line; raises `InputError` for anything else."""
    try:
        value = msgspec.json.decode(line)
        _check_limits(value)
    except UnicodeDecodeError as error:
        raise InputError("it is not UTF-8") from error
    except RecursionError as error:
        raise InputError("it is nested too deeply") from error
    except msgspec.MsgspecError as error:
        raise InputError(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError("it is not a JSON object")
    return value


def read_objects(
    path: Path, make: Callable[[dict[str, Any]], _T]
) -> Iterator[tuple[int, _T | InputError]]:
    """What `make` returns for each line, or its `InputError`, with the number of the line."""
    for number, line in read_lines(path):
        try:
            yield number, make(parse_object(line))
        except InputError as error:
            yield number, error


def _check_limits(value: Any, depth: int = 0) -> None:
    """Raise `InputError` for deep nesting and for large integers."""
    if isinstance(value, dict | list):
        if depth == _DEEPEST:
            raise InputError("it is nested too deeply")
        for item in value.values() if isinstance(value, dict) else value:
            _check_limits(item, depth + 1)
    elif isinstance(value, int) and not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise InputError("it holds a whole number of more than 64 bits")


def read_json_file(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it is missing or holds anything else."""
    if not path.is_file():  # reading a pipe would block
        return None
    try:
        return parse_object(path.read_bytes())
    except (OSError, InputError):
        return None


def build(kind: type[_T], row: dict[str, Any]) -> _T:
    """A dataclass from a JSON object; raises `InputError` for a missing field or a wrong type.

    Lists become tuples, and integers floats, where these are declared. Other keys are ignored.
    """
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        reason = str(error).replace(" - at `$.", " at `")
        raise InputError(f"{reason[:1].lower()}{reason[1:]}") from error


def to_line(row: Any) -> str:
    """A dataclass as one line of JSON; numbers that are not finite are null there."""
    return msgspec.json.encode(row).decode() + "\n"


def append_line(path: Path, line: str) -> None:
    """Append a line and sync it; if that fails, restore the file and raise `RunStopped`."""
    size = path.stat().st_size if path.exists() else 0
    with _or_stop(path, lambda: os.truncate(path, size)):
        _write(path, "a", [line])


def rewrite_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a file atomically by these lines; raises `RunStopped` if it fails."""
    scratch = path.with_name(f"{path.name}.tmp")
    with _or_stop(path, scratch.unlink):
        _write(scratch, "w", lines)
        scratch.replace(path)


def _write(path: Path, mode: str, lines: Iterable[str]) -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _or_stop(path: Path, undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            undo()
        raise RunStopped(
            f"{path} could not be written ({error.strerror}). Its earlier content is intact: make "
            "room, then resume the run."
        ) from error
