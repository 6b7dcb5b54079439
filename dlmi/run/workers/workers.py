"""What the processes of a run share: a counter, and worker 0's word at the start.

No gradient, parameter, prompt or row ever crosses. Before the first step all take over worker 0's
targets and meet once; after that a worker takes the next target from a counter and nobody waits for
anybody. Rows and checkpoints are files. With one worker the store lives in the process, so that
there is one way of working.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from dlmi.errors import RunStopped

MEET_WITHIN = 1800.0  # seconds: loading a large LM from a slow disk takes its time
_POLL_SECONDS = 0.02
_BEYOND = 2**62

T = TypeVar("T")


class Workers:
    """One process of a run, and its view of the others.

    Args:
        store: What all of them reach.
        index: Which one this is.
        size: How many there are.
        ended: Tells of a worker of this machine that has ended with an error, as its launcher sees.
    """

    def __init__(
        self,
        store: Store,
        index: int = 0,
        size: int = 1,
        ended: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.index = index
        self.size = size
        self.ended = ended
        self._store = store
        self._broadcasts = 0
        self._barriers = 0

    @classmethod
    def alone(cls) -> "Workers":
        """A run of one process."""
        return cls(HashStore())

    def broadcast(self, value: Any) -> Any:
        """What worker 0 has, for everybody: plain values that JSON can hold. All must call it."""
        key = f"broadcast/{self._broadcasts}"
        self._broadcasts += 1
        if self.size == 1:
            return value
        if self.index == 0:
            self._store.set(key, json.dumps(value))
            return value
        self._wait_for([key], MEET_WITHIN)
        return json.loads(self._store.get(key))

    def barrier(self, within: float = MEET_WITHIN) -> None:
        """Wait until all have come here, so many seconds at most. All must call it."""
        name = f"barrier/{self._barriers}"
        self._barriers += 1
        self._store.set(f"{name}/{self.index}", "")
        self._wait_for([f"{name}/{index}" for index in range(self.size)], within)

    def take(self) -> int:
        """The next number, from 0 on: each goes to one worker."""
        try:
            return self._store.add("taken", 1) - 1
        except RuntimeError:  # worker 0, which keeps the count, is gone: done, or dead
            return _BEYOND

    def take_from(self, items: Sequence[T]) -> Iterator[T]:
        """Those of a list that fall to this worker; at its end the counter is not asked again."""
        while (place := self.take()) < len(items):
            yield items[place]

    def _wait_for(self, keys: list[str], within: float) -> None:
        deadline = time.monotonic() + within
        try:
            while not self._store.check(keys):
                if ended := self.ended():
                    raise RunStopped(f"{ended}.")
                if time.monotonic() > deadline:
                    raise RunStopped(f"not all of {self.size} workers came within {within:.0f} s.")
                time.sleep(_POLL_SECONDS)
        except RunStopped:
            raise
        except RuntimeError as error:
            raise RunStopped("worker 0 is gone, before all workers had started.") from error
