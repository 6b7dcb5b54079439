"""The targets that wait for a slot, shared by all workers of a run."""

from collections.abc import Sequence

from dlmi.run.workers.workers import Ranks
from dlmi.targets.target import Target


class TargetQueue:
    """Hands each target to one slot of one worker.

    Every worker holds the same list; which place comes next is a counter that all share. Of a group
    that a worker has solved it takes no more targets.

    Args:
        ranks: Who takes from it.
        targets: In the order in which they are handed out.
    """

    def __init__(self, ranks: Ranks, targets: Sequence[Target] = ()) -> None:
        self._ranks = ranks
        self._targets = targets
        self._is_empty = not targets
        self._solved_groups: set[str | None] = set()

    def take(self) -> Target | None:
        """The next target, or None if all are given away."""
        while not self._is_empty:
            place = self._ranks.take()
            self._is_empty = place + 1 >= len(self._targets)
            if place < len(self._targets) and self._is_wanted(self._targets[place]):
                return self._targets[place]
        return None

    def end_group(self, group: str) -> None:
        """Hand out no more targets of a group."""
        self._solved_groups.add(group)

    def _is_wanted(self, target: Target) -> bool:
        return target.group not in self._solved_groups

    def __len__(self) -> int:
        if self._is_empty:
            return 0
        return sum(map(self._is_wanted, self._targets[self._ranks.taken :]))
