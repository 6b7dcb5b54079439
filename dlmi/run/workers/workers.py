"""What the processes of a run share: a counter, and worker 0's values at the start.

No gradient, parameter, prompt or row is sent. Before the first step all workers take worker 0's
targets and wait for each other once; after that each takes the next target from a counter, and none
waits for another. Rows and checkpoints are files.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from dlmi.errors import RunStopped

MEET_WITHIN = 1800.0  # seconds: a large LM on a slow disk takes long to load
_POLL_SECONDS = 0.02
_BEYOND = 2**62

T = TypeVar("T")


class Workers:
    """One process of a run, and its view of the others.

    Args:
        store: A key-value store that all of them reach; a single worker needs none.
        index: Which one this is.
        size: How many there are.
        ended: Describes a worker of this machine that has ended with an error, if one has.
    """

    def __init__(
        self,
        store: Store | None = None,
        index: int = 0,
        size: int = 1,
        ended: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.index = index
        self.size = size
        self.ended = ended
        self._store = store or HashStore()
        self._calls = 0  # of `broadcast` and `barrier`, the same on all workers

    def broadcast(self, value: Any) -> Any:
        """Worker 0's value, which JSON must be able to hold. All workers must call it."""
        self._calls += 1
        if self.size == 1:
            return value
        key = f"broadcast/{self._calls}"
        if self.index == 0:
            self._store.set(key, json.dumps(value))
            return value
        self._wait_for([key], MEET_WITHIN)
        return json.loads(self._store.get(key))

    def barrier(self, within: float = MEET_WITHIN) -> None:
        """Wait until all workers call it, at most so many seconds."""
        self._calls += 1
        keys = [f"barrier/{self._calls}/{index}" for index in range(self.size)]
        self._store.set(keys[self.index], "")
        self._wait_for(keys, within)

    def take(self) -> int:
        """The next number, from 0 on: each goes to one worker."""
        try:
            return self._store.add("taken", 1) - 1
        except RuntimeError:  # worker 0, which keeps the count, has ended
            return _BEYOND

    def take_from(self, items: Sequence[T]) -> Iterator[T]:
        """The items of a list that fall to this worker."""
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
            raise RunStopped("worker 0 ended before all workers had started.") from error
