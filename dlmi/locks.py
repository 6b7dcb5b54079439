"""One writer per folder."""

import fcntl
from pathlib import Path
from typing import IO

from dlmi.errors import InputError


def lock_folder(folder: Path) -> IO[bytes]:
    """Keep other processes out of a folder; the system lets go when this one ends.

    Returns:
        What holds the lock, until it is closed.

    Raises:
        InputError: If another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InputError(
            f"Expected a folder of its own, but another process is writing to {folder}. Wait for "
            "it to end, or choose another folder."
        ) from error
    return lock
