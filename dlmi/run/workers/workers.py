"""What the processes of a run tell each other, through one key-value store.

No gradient, parameter or prompt ever crosses. A worker takes the next target from a counter that
all share, posts the rows that it finished and how it stands, and hears when others want to stop or
have gone. Between the start and the end of a run nobody waits for anybody. With one worker the
store lives in the process, so that there is one way of working.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from dlmi.errors import RunStopped

_POLL_SECONDS = 0.02
_BEAT_SECONDS = 1.0
_BEYOND = 2**62
_UNREACHABLE = "worker 0, which the others report to, cannot be reached"


class Ranks:
    """One process of a run, and its view of the others.

    Args:
        store: What all of them reach.
        rank: Which one this is.
        size: How many there are.
        watch: Tells which worker is known to have ended, and how, from what the launcher sees.
        patience: Seconds without a sign of life after which a worker counts as gone.
    """

    def __init__(
        self,
        store: Store,
        rank: int = 0,
        size: int = 1,
        watch: Callable[[], tuple[int, str] | None] = lambda: None,
        patience: float = 120.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._watch = watch
        self._patience = patience
        self._others = [other for other in range(size) if other != rank]
        self._broadcasts = 0
        self._barriers = 0
        self._rows_read = 0
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._has_left = threading.Event()
        self._stop_seen = False
        self._trouble: str | None = None
        self._pulse: threading.Thread | None = None

    @classmethod
    def alone(cls) -> "Ranks":
        """A run of one process."""
        return cls(HashStore())

    def start_pulse(self) -> None:
        """Give signs of life from now on, and look for those of the others."""
        if self.size > 1 and self._pulse is None:
            self._pulse = threading.Thread(target=self._beat, name="dlmi-pulse", daemon=True)
            self._pulse.start()

    # ---- all together, before the first step and after the last

    def broadcast(self, value: Any) -> Any:
        """What worker 0 has, for everybody: plain values that JSON can hold. All must call it."""
        key = f"broadcast/{self._broadcasts}"
        self._broadcasts += 1
        if self.size == 1:
            return value
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        self._wait_for([key])
        return json.loads(self._store.get(key))

    def barrier(self, within: float = math.inf) -> None:
        """Wait until all have come here, so many seconds at most. All must call it."""
        name = f"barrier/{self._barriers}"
        self._barriers += 1
        self._store.set(f"{name}/{self.rank}", "")
        self._wait_for([f"{name}/{other}" for other in self._others], within)

    def leave(self) -> None:
        """Say that this worker is done, all its rows posted."""
        if not self._has_left.is_set():
            self._has_left.set()
            self._tell(f"left/{self.rank}", "")

    @property
    def others_have_left(self) -> bool:
        """Whether this is the last one."""
        return self._has(f"left/{other}" for other in self._others)

    # ---- the queue

    def take(self) -> int:
        """The next number, from 0 on: each goes to one worker."""
        return self._count("taken", 1) - 1

    @property
    def taken(self) -> int:
        """How many numbers have been asked for."""
        return self._count("taken", 0)

    # ---- news

    def post_row(self, line: str) -> None:
        """Tell worker 0 of a finished row."""
        if self.rank:
            self._tell(f"row/{self._count('rows', 1) - 1}", line)

    def new_rows(self) -> list[str]:
        """Rows that other workers have posted since the last call; for worker 0."""
        lines = []
        while self._others and self._has([key := f"row/{self._rows_read}"]):
            lines.append(self._store.get(key).decode())
            self._store.delete_key(key)
            self._rows_read += 1
        return lines

    def post_status(self, status: dict[str, Any]) -> None:
        """Tell worker 0 how this one stands."""
        if self.rank:
            self._tell(f"status/{self.rank}", json.dumps(status))

    def statuses(self) -> list[dict[str, Any]]:
        """The latest word of each other worker that is still at work; for worker 0."""
        at_work = [
            f"status/{other}"
            for other in self._others
            if self._has([f"status/{other}"]) and not self._has([f"left/{other}"])
        ]
        return [json.loads(self._store.get(key)) for key in at_work]

    def request_stop(self) -> None:
        """Ask all workers to end after their step."""
        if self._others and not self._stop_seen:
            self._tell("stop", "")

    @property
    def is_stop_requested(self) -> bool:
        """Whether a worker has asked for it."""
        return self._stop_seen

    @property
    def trouble(self) -> str | None:
        """What became of a worker that ended before its time, if one did."""
        return self._trouble

    # ---- signs of life

    def _beat(self) -> None:
        count = 0
        while not self._has_left.wait(_BEAT_SECONDS):
            count += 1
            if ended := self._watch():
                self._trouble = f"worker {ended[0]} of {self.size} has ended ({ended[1]})"
                return
            try:
                self._store.set(f"beat/{self.rank}", str(count))
                self._stop_seen = self._stop_seen or self._has(["stop"])
                silent = [other for other in self._others if self._is_silent(other)]
            except RuntimeError:
                self._trouble = _UNREACHABLE
                return
            if silent:
                self._trouble = (
                    f"worker {silent[0]} of {self.size} has given no sign of life for "
                    f"{self._patience:.0f} seconds"
                )
                return

    def _is_silent(self, other: int) -> bool:
        if self._has([f"left/{other}"]):
            return False
        key = f"beat/{other}"
        if not self._has([key]):
            return False  # not yet here
        now, beat = time.monotonic(), self._store.get(key)
        latest, since = self._beats.get(other, (b"", now))
        if beat != latest:
            self._beats[other] = beat, now
            return False
        return now - since > self._patience

    def _has(self, keys: Iterable[str]) -> bool:
        wanted = list(keys)
        return not wanted or self._store.check(wanted)

    def _tell(self, key: str, value: str) -> None:
        """Set a key, unless there is nobody left to read it."""
        if self._trouble is None:
            try:
                self._store.set(key, value)
            except RuntimeError:
                self._trouble = _UNREACHABLE

    def _count(self, key: str, by: int) -> int:
        """Add to a counter that all share; without them it stands beyond any queue."""
        if self._trouble is None:
            try:
                return self._store.add(key, by)
            except RuntimeError:
                self._trouble = _UNREACHABLE
        return _BEYOND

    def _wait_for(self, keys: list[str], within: float = math.inf) -> None:
        deadline = time.monotonic() + within
        while not self._has(keys):
            if self._trouble is not None:
                raise RunStopped(f"{self._trouble}.")
            if time.monotonic() > deadline:
                raise RunStopped(f"not all of {self.size} workers came within {within:.0f} s.")
            time.sleep(_POLL_SECONDS)
