"""What the end of a shared queue costs: ranks that have nothing left while others still work.

Each rank takes the next target from the queue whenever one of its slots is free. A step of a rank
takes longer the more of its slots are filled, so the last targets of a run go faster, but not as
much faster as there are fewer of them.
"""

import heapq
import random
from collections.abc import Callable, Sequence


def makespan(
    steps: Sequence[int], ranks: int, slots: int, step_seconds: Callable[[int], float]
) -> float:
    """Seconds until the last target is done.

    Args:
        steps: That each target takes, in the order of the queue.
        ranks: Devices.
        slots: Of each.
        step_seconds: Of a step with so many slots filled.
    """
    # At the start the queue is dealt out evenly, one slot of every rank after the other.
    first = min(len(steps), ranks * slots)
    queue = iter(steps[first:])
    left = [list(steps[rank:first:ranks]) for rank in range(ranks)]
    events = [(min(own) * step_seconds(len(own)), rank) for rank, own in enumerate(left) if own]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, rank = heapq.heappop(events)
        taken = min(left[rank])
        still = [count - taken for count in left[rank] if count > taken]
        while len(still) < slots and (upcoming := next(queue, None)) is not None:
            still.append(upcoming)
        left[rank] = still
        if still:
            heapq.heappush(events, (now + min(still) * step_seconds(len(still)), rank))
    return now


def ideal_seconds(
    steps: Sequence[int], ranks: int, slots: int, step_seconds: Callable[[int], float]
) -> float:
    """The same if every slot were filled to the very end."""
    return sum(steps) * step_seconds(slots) / (ranks * slots)


def unequal_steps(targets: int, budget: int, solved_share: float = 0.5, seed: int = 0) -> list[int]:
    """Steps of targets of which a share is solved at a time that is uniform over the budget."""
    draw = random.Random(seed)
    return [
        draw.randint(1, budget) if draw.random() < solved_share else budget for _ in range(targets)
    ]
