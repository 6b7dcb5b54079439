"""The targets that wait for a slot, shared by all workers of a run."""

from collections.abc import Sequence

from dlmi.run.workers.workers import Workers
from dlmi.targets.target import Target


class TargetQueue:
    """Hands each target to one slot of one worker.

    Every worker holds the same list; which place comes next is a counter that all share. Of a group
    that a worker has solved it takes no more targets.

    Args:
        workers: Who takes from it.
        targets: In the order in which they are handed out.
    """

    def __init__(self, workers: Workers, targets: Sequence[Target] = ()) -> None:
        self._workers = workers
        self._targets = targets
        self._solved_groups: set[str | None] = set()

    def take(self) -> Target | None:
        """The next target, or None if all are given away."""
        while self._targets:
            place = self._workers.take()
            if place >= len(self._targets):
                self._targets = ()  # worker 0, which keeps the count, may leave from now on
            elif self._targets[place].group not in self._solved_groups:
                return self._targets[place]
        return None

    def end_group(self, group: str) -> None:
        """Hand out no more targets of a group."""
        self._solved_groups.add(group)
