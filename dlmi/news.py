"""What a rank hears from the others between two steps, and tells them."""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlmi.results import Inversion

if TYPE_CHECKING:
    from dlmi.inverter import Inverter

_EVERY_SECONDS = 0.5
_WAIT_SECONDS = 0.1


class News:
    """Keeps rank 0 informed, and every rank ready to stop with the others.

    Attributes:
        from_peers: On rank 0, the latest status of each other rank that is at work: `in_flight`
            (best LCS of each slot), `left` (budgets still to be spent), `steps` (slots' steps so
            far) and `scalars` (numbers of its latest evaluation, by name).
        scalars: Of this rank, for its status.
        steps: Of this rank's slots so far.
    """

    def __init__(self) -> None:
        self.from_peers: list[dict[str, Any]] = []
        self.scalars: dict[str, list[float]] = {}
        self._last = float("-inf")
        self.steps = 0

    def exchange(
        self,
        module: "Inverter",
        until: Callable[[], bool] | None = None,
        to_the_end: bool = False,
    ) -> None:
        """Hear and tell, at most twice a second.

        Args:
            module: The run.
            until: On rank 0, go on hearing until this is true.
            to_the_end: Let no request to stop cut that short.
        """
        ranks = module.ranks
        if ranks.size == 1:
            return
        is_waiting = until is not None and ranks.rank == 0
        if not is_waiting and time.monotonic() - self._last < _EVERY_SECONDS:
            return
        self._hear(module)
        while is_waiting and not (until and until()) and ranks.trouble is None:
            if module.stop_requested and not to_the_end:
                break
            for callback in module.inversion_callbacks:
                callback.on_waiting(module.trainer, module)
            time.sleep(_WAIT_SECONDS)
            self._hear(module)
        if is_waiting:
            self._hear(module)  # rows come before the word that their rank has left
        self._last = time.monotonic()

    def _hear(self, module: "Inverter") -> None:
        ranks = module.ranks
        if module.stop_requested:
            ranks.request_stop()
        elif ranks.is_stop_requested or ranks.trouble is not None:
            module.stop_requested = True
        if ranks.rank == 0:
            for line in ranks.new_rows():
                row = Inversion.from_json(json.loads(line))
                module.finished.append(row)
                for callback in module.inversion_callbacks:
                    callback.on_peer_target_end(module.trainer, module, row)
            self.from_peers = ranks.statuses()
            return
        slots = module.active
        ranks.post_status(
            {
                "in_flight": [slot.best.lcs for slot in slots if slot.best is not None],
                "left": sum(1 - module.budget.share_used(slot) for slot in slots),
                "steps": self.steps,
                "scalars": self.scalars,
            }
        )
