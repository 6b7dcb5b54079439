"""The targets that wait for a slot, shared by all ranks of a run."""

from collections.abc import Sequence

from dlmi.ranks import Ranks
from dlmi.targets import Target


class TargetQueue:
    """Hands each target to one slot of one rank.

    Every rank holds the same list; which place comes next is a counter that all share.

    Args:
        ranks: Who takes from it.
        targets: In the order in which they are handed out.
    """

    def __init__(self, ranks: Ranks, targets: Sequence[Target] = ()) -> None:
        self._ranks = ranks
        self._targets = targets
        self._is_empty = not targets

    def take(self) -> Target | None:
        """The next target, or None if all are given away."""
        if self._is_empty:
            return None
        place = self._ranks.take()
        self._is_empty = place + 1 >= len(self._targets)
        return self._targets[place] if place < len(self._targets) else None

    def __len__(self) -> int:
        return 0 if self._is_empty else max(0, len(self._targets) - self._ranks.taken)
