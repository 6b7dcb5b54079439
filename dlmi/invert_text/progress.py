"""The progress of a search, and how Ctrl-C ends it."""

import dataclasses
import logging
import math
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


OnProgress = Callable[[Progress], None]


class Watch(InversionCallback):
    """Reports the progress of a search and keeps the best row of each text.

    A text is a target. Its starts are targets of their own, in a group that has the text's id.
    """

    def __init__(self, on_progress: OnProgress | None, budget: float) -> None:
        self.stop_requested = False  # set by Ctrl-C: the run ends after its step
        self.found: dict[str, Inversion] = {}  # the best row of each text, by its id
        self.latest: dict[str, Inversion] = {}  # the row of each start at its latest length
        self._on_progress = on_progress
        self._budget = budget  # in seconds; may be infinite
        self._started = time.monotonic()
        self._best: dict[str | None, Evaluation] = {}  # of each text, by its id

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float:
        """Seconds left of the budget."""
        return max(0.0, self._budget - self.seconds)

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
        text_id = row.target_id.rpartition("#")[0]
        earlier = self.latest.get(row.target_id)  # of another length
        names = ("steps", "forward_tokens", "backward_tokens")
        spent = {name: getattr(row, name) + getattr(earlier, name, 0) for name in names}
        row = dataclasses.replace(row, seconds=self.seconds, **spent)
        self.latest[row.target_id] = row
        self.found[text_id] = max(
            self.found.get(text_id, row),
            row,
            key=lambda r: (
                r.round_trips or may_break,
                r.lcs,
                -len(r.prompt_ids) if r.exact else 0,
                -r.discrete_loss,
            ),
        )

    def result(self, text_id: str) -> Inversion:
        """The row of a text, with the seconds and the stop reason of the whole search."""
        row = self.found[text_id]
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
            new, group = slot.best, slot.target.group
            assert new is not None
            best = self._best.get(group, new)
            is_exact = new.output_ids == slot.target.ids
            is_shorter = is_exact and len(new.prompt_ids) < len(best.prompt_ids)
            self._best[group] = new if is_shorter else max(best, new, key=lambda e: e.score)
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
                seconds_left=None if self._budget == math.inf else self.seconds_left,
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
