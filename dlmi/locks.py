"""One writer per folder, or one per rank."""

import fcntl
import time
from pathlib import Path
from typing import IO

from dlmi.errors import InputError

_POLL_SECONDS = 0.1


def lock_folder(folder: Path, rank: int = 0, patience: float = 0.0) -> IO[bytes]:
    """Keep other processes out of a folder; the system lets go when this one ends.

    Args:
        folder: Made if it is not there.
        rank: Ranks of a run have a lock each.
        patience: Seconds to wait for a process that is on its way out.

    Returns:
        What holds the lock, until it is closed.

    Raises:
        InputError: If another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / (f".lock.rank{rank}" if rank else ".lock")).open("wb")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            lock.close()
            raise InputError(
                f"Expected a folder of its own, but another process is writing to {folder}. Wait "
                "for it to end, or choose another folder."
            ) from error
        return lock


def wait_for_other_ranks(folder: Path, patience: float) -> None:
    """Wait until no rank of an earlier part of the run writes to a folder any more.

    When rank 0 is killed, the others notice within a second or two, save, and end.

    Raises:
        InputError: If one is still there after `patience` seconds.
    """
    for path in folder.glob(".lock.rank*"):
        rank = path.name.removeprefix(".lock.rank")
        if rank.isdigit():
            lock_folder(folder, int(rank), patience).close()
