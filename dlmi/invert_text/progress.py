"""The progress of a search, and how Ctrl-C ends it."""

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer

from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.inverter import Inverter
from dlmi.scoring.evaluation import Evaluation
from dlmi.targets.target import Target

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The state of the search for one text; prompt and output are the best so far."""

    text: str  # what the LM is to say
    target_ids: tuple[int, ...]
    prompt_length: int  # tokens of the prompts that are being tried
    step: int  # optimisation steps at this length
    prompt_text: str
    prompt_ids: tuple[int, ...]
    output_text: str  # what the LM says to the prompt
    output_ids: tuple[int, ...]
    output_tokens: tuple[str, ...]  # the text of each token alone
    lcs: float  # honest LCS ratio
    exact: bool  # whether the output is the text, token for token
    seconds: float  # since the search began
    seconds_left: float | None  # of the budget; None if only steps are limited


class Watch(InversionCallback):
    """Reports the progress of a search and keeps the best row of each text.

    Args:
        on_progress: Called after each step and each evaluation, for each text in progress.
        seconds: Budget of time, or None.

    Attributes:
        stop_requested: Set by Ctrl-C: the run ends after its step.
        found: The best row of each text, by the group of its targets.
    """

    def __init__(
        self, on_progress: Callable[[Progress], None] | None, seconds: float | None
    ) -> None:
        self.stop_requested = False
        self.found: dict[str, Inversion] = {}
        self._on_progress = on_progress
        self._budget = seconds
        self._started = time.monotonic()
        self._best: dict[str | None, Evaluation] = {}  # by group
        self._latest: dict[str, Inversion] = {}  # the row of each start, by the id of its target

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Seconds left of the budget; None without a limit."""
        return None if self._budget is None else max(0.0, self._budget - self.seconds)

    @property
    def solved(self) -> set[str]:
        """The groups of the texts with an exact prompt."""
        return {group for group, row in self.found.items() if row.exact}

    @property
    def prompts(self) -> dict[str, tuple[int, ...]]:
        """The best prompt of each start at its latest length, by the id of its target."""
        return {target_id: row.prompt_ids for target_id, row in self._latest.items()}

    def go_on(self, target: Target) -> Target:
        """A start of a text that goes on from its best prompt."""
        start = dataclasses.replace(target, id=f"{target.id}#0", group=target.id)
        self._latest[start.id] = self.found[target.id]
        return start

    def on_evaluation(self, trainer: Trainer, module: Inverter, slots: list[Slot]) -> None:
        """Report the best of each text."""
        self._show(slots)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Inverter, *_: Any) -> None:  # type: ignore[override]
        """Report each text, and end the run after Ctrl-C."""
        self._show(pl_module.active)
        pl_module.stop_requested |= self.stop_requested

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Keep the best row of each text; of exact ones that of the shortest prompt."""
        may_break = not module.vocabulary.must_round_trip
        group = row.target_id.rpartition("#")[0]
        names = ("steps", "forward_tokens", "backward_tokens")
        earlier = self._latest.get(row.target_id)  # of another length
        spent = {name: getattr(row, name) + getattr(earlier, name, 0) for name in names}
        row = dataclasses.replace(row, seconds=self.seconds, **spent)
        self._latest[row.target_id] = row
        self.found[group] = max(
            self.found.get(group, row),
            row,
            key=lambda r: (
                r.round_trips or may_break,
                r.lcs,
                -len(r.prompt_ids) if r.exact else 0,
                -r.discrete_loss,
            ),
        )

    def result(self, group: str) -> Inversion:
        """The row of a text, with the seconds and the stop reason of the whole search."""
        row = self.found[group]
        if row.exact:
            return row
        # A run that is out of time counts as interrupted; here it has spent its budget.
        reason = row.stop_reason.replace("interrupted", "budget")
        reason = "interrupted" if self.stop_requested else reason
        return dataclasses.replace(row, seconds=self.seconds, stop_reason=reason)

    def _show(self, slots: Sequence[Slot]) -> None:
        if self._on_progress is None:
            return
        for slot in slots:
            assert slot.best is not None
            best = self._best.get(slot.target.group, slot.best)
            is_exact = slot.best.output_ids == slot.target.ids
            if is_exact and len(slot.best.prompt_ids) < len(best.prompt_ids):
                best = slot.best
            self._best[slot.target.group] = max(best, slot.best, key=lambda e: e.score)
        for slot in {slot.target.group: slot for slot in slots}.values():
            best, lm = self._best[slot.target.group], slot.tokens.lm
            progress = Progress(
                text=slot.target.text,
                target_ids=slot.target.ids,
                prompt_length=slot.length,
                step=slot.step,
                prompt_text=lm.decode(best.prompt_ids),
                prompt_ids=best.prompt_ids,
                output_text=lm.decode(best.output_ids),
                output_ids=best.output_ids,
                output_tokens=tuple(lm.decode([token_id]) for token_id in best.output_ids),
                lcs=best.lcs,
                exact=best.output_ids == slot.target.ids,
                seconds=self.seconds,
                seconds_left=self.seconds_left,
            )
            self._on_progress(progress)

    @contextmanager
    def stop_on_ctrl_c(self) -> Iterator[None]:
        """Let the first Ctrl-C end the run after its step, and a second one stop at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can handle signals
            return
        previous = signal.getsignal(signal.SIGINT)

        def request_stop(signum: int, frame: FrameType | None) -> None:
            self.stop_requested = True
            signal.signal(signal.SIGINT, previous)
            _log.info("stopping after this step; Ctrl-C again stops at once")

        signal.signal(signal.SIGINT, request_stop)
        try:
            yield
        except SystemExit as ended:
            if self.stop_requested:  # Lightning raises this after a second Ctrl-C
                raise KeyboardInterrupt from ended
            raise
        finally:
            signal.signal(signal.SIGINT, previous)
