"""What a user is told in one line: mistakes that can be mended, and runs that had to stop."""

import errno
import math


class InputError(ValueError):
    """A user's mistake, told in one line.

    The line names the argument, what was expected, what came and the way out. On the command line
    it is printed without a traceback and the exit code is 2.
    """


class RunStopped(RuntimeError):
    """A run that could not go on through no mistake of its settings, told in one line.

    What was on disk before stays whole. On the command line the exit code is 1.
    """


def find_input_error(error: BaseException | None) -> InputError | None:
    """The user's mistake behind an error (jsonargparse wraps it), if there is one."""
    if error is None or isinstance(error, InputError):
        return error
    return find_input_error(error.__cause__)


def run_stopped_behind(error: BaseException) -> RunStopped:
    """What stopped a run, behind errors that came of it; what is no fault of the system is raised.

    The system's are a full disk, a folder that may not be written, a file that has gone.
    """
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
        f"the disk is full{place}. What was written before is whole: make room, then resume."
    )


def first_line(error: BaseException) -> str:
    """What an error of someone else says, without all that follows."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error says that a disk, or a user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def check_at_least_one(section: str, **values: int | None) -> None:
    """Raise `InputError` for the first value below 1; None is one that was not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(f"Expected `{section}.{name}` to be at least 1, but got {value}.")


def check_between(section: str, low: float, high: float, **values: float) -> None:
    """Raise `InputError` for the first value outside of a range; its ends belong to it."""
    for name, value in values.items():
        if not low <= value <= high:
            wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise InputError(f"Expected `{section}.{name}` to be {wanted}, but got {value}.")


def check_positive(section: str, **values: float) -> None:
    """Raise `InputError` for the first value that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"Expected `{section}.{name}` to be positive, but got {value}.")
