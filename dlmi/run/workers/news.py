"""What a worker hears from the others between two steps, and tells them."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lightning.pytorch import Trainer

from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.budget import Budget
from dlmi.run.workers.workers import Ranks

_EVERY_SECONDS = 0.5
_WAIT_SECONDS = 0.1


class Observer(Protocol):
    """Whoever follows a run of several workers: its callbacks."""

    def on_peer_target_end(self, trainer: Trainer, module: Any, row: Inversion) -> None:
        """On worker 0, when another worker is done with a target."""

    def on_waiting(self, trainer: Trainer, module: Any) -> None:
        """While worker 0 waits for others."""


class Informed(Protocol):
    """What is heard of and told about an `Inverter`; its attributes are explained there."""

    ranks: Ranks
    budget: Budget
    finished: list[Inversion]
    stop_requested: bool

    @property
    def trainer(self) -> Trainer:
        """Lightning's."""

    @property
    def active(self) -> list[Slot]:
        """The slots in flight."""

    @property
    def inversion_callbacks(self) -> Sequence[Observer]:
        """Those that follow targets."""


class News:
    """Keeps worker 0 informed, and every worker ready to stop with the others.

    Attributes:
        from_peers: On worker 0, the latest status of each other worker: `in_flight`
            (best LCS of each slot), `left` (budgets still to be spent), `steps` (slots' steps so
            far) and `scalars` (numbers of its latest evaluation, by name).
        scalars: Of this worker, for its status.
        steps: Of this worker's slots so far.
    """

    def __init__(self) -> None:
        self.from_peers: list[dict[str, Any]] = []
        self.scalars: dict[str, list[float]] = {}
        self._last = float("-inf")
        self.steps = 0

    def exchange(
        self,
        module: Informed,
        until: Callable[[], bool] | None = None,
        to_the_end: bool = False,
    ) -> None:
        """Hear and tell, at most twice a second.

        Args:
            module: The run.
            until: On worker 0, go on hearing until this is true.
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
            self._hear(module)  # rows come before the word that their worker has left
        self._last = time.monotonic()

    def _hear(self, module: Informed) -> None:
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
