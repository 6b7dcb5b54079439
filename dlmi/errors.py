"""Errors that are shown to the user as one line: invalid input, and runs that had to stop."""

import errno
import math


class InputError(ValueError):
    """Invalid input; the message names the argument, what was expected and what was given.

    On the command line it is printed without a traceback and the exit code is 2.
    """


class RunStopped(RuntimeError):
    """A run that cannot continue, though its input is valid; files written before stay intact.

    On the command line it is printed without a traceback and the exit code is 1.
    """


def find_input_error(error: BaseException | None) -> InputError | None:
    """The `InputError` that caused an error, if there is one; jsonargparse wraps it."""
    if error is None or isinstance(error, InputError):
        return error
    return find_input_error(error.__cause__)


def run_stopped_behind(error: BaseException) -> RunStopped:
    """The `RunStopped` that caused an error, or one made from an `OSError`; others are raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RunStopped):
            return cause
        cause = cause.__cause__ or cause.__context__
    if not isinstance(error, OSError):
        raise error
    if not is_disk_full(error):
        return RunStopped(f"the system refused ({error}).")
    place = f" ({error.filename})" if error.filename else ""
    return RunStopped(
        f"the disk is full{place}. Files written before are intact: make room, then resume."
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or all of a list, without the full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = " ".join(map(str.strip, lines)) if lines[0].rstrip().endswith(":") else lines[0]
    return line.strip().rstrip(".")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error means that a disk, or a user's quota, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def check_at_least_one(section: str, **values: int | None) -> None:
    """Raise `InputError` for the first value below 1; None is ignored."""
    given = {name: value for name, value in values.items() if value is not None}
    check_between(section, 1, math.inf, **given)


def check_between(section: str, low: float, high: float, **values: float) -> None:
    """Raise `InputError` for the first value outside of [low, high]."""
    for name, value in values.items():
        if not low <= value <= high:
            wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise InputError(f"Expected `{section}.{name}` to be {wanted}, but got {value}.")


def check_positive(section: str, **values: float) -> None:
    """Raise `InputError` for the first value that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"Expected `{section}.{name}` to be positive, but got {value}.")
