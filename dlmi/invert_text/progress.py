"""How a search stands, told to whoever asked after each step, and how Ctrl-C ends it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from dlmi.methods.slot import Slot
from dlmi.rows import Inversion
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.inverter import Inverter
from dlmi.scoring.evaluation import Evaluation


@dataclass(frozen=True)
class Progress:
    """How the search for one text stands.

    Attributes:
        text: What the LM is to say.
        target_ids: The same as token ids.
        prompt_length: Tokens of the prompts that are being tried.
        step: Optimisation steps at this length.
        prompt_text: The best prompt so far, at any length.
        prompt_ids: The same as token ids.
        output_text: What the LM says to it.
        output_ids: The same as token ids.
        output_tokens: The text of each of them alone.
        lcs: Honest LCS ratio of that.
        exact: Whether it is the text, token for token.
        seconds: Since the search began.
        seconds_left: Of the budget; None where that is in steps alone.
    """

    text: str
    target_ids: tuple[int, ...]
    prompt_length: int
    step: int
    prompt_text: str
    prompt_ids: tuple[int, ...]
    output_text: str
    output_ids: tuple[int, ...]
    output_tokens: tuple[str, ...]
    lcs: float
    exact: bool
    seconds: float
    seconds_left: float | None


class Watch(InversionCallback):
    """Follows the runs of a search.

    Args:
        on_progress: Called after each step and each evaluation, for each text in flight.
        seconds: Budget of time, or None.

    Attributes:
        stop_requested: Set by Ctrl-C: the run ends after its step.
        exact_after: Seconds from the start of the search until a target was exact, by its id.
    """

    def __init__(
        self, on_progress: Callable[[Progress], None] | None, seconds: float | None
    ) -> None:
        self.stop_requested = False
        self.exact_after: dict[str, float] = {}
        self._on_progress = on_progress
        self._seconds = seconds
        self._started = self._run_started = time.monotonic()
        self._first_step_after = -1.0  # of the latest run; for the first one there is always time
        self._best: dict[str | None, Evaluation] = {}  # by the group of a text's targets

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Of the budget; None where there is no limit."""
        return None if self._seconds is None else max(0.0, self._seconds - self.seconds)

    @property
    def has_time(self) -> bool:
        """Whether a run would get as far as its first step, as the one before did."""
        left = self.seconds_left
        return left is None or left > self._first_step_after

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note when a run begins."""
        self._run_started, self._first_step_after = time.monotonic(), 0.0

    def on_evaluation(self, trainer: Trainer, module: Inverter, slots: list[Slot]) -> None:
        """Keep what is the best of its text; ties keep the earlier."""
        for slot in slots:
            assert slot.best is not None
            best = self._best.get(slot.target.group)
            if best is None or slot.best.score > best.score:
                self._best[slot.target.group] = slot.best
        self._show(slots)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Inverter, *_: Any) -> None:  # type: ignore[override]
        """End the run if someone asks for it."""
        self._first_step_after = self._first_step_after or time.monotonic() - self._run_started
        self._show(pl_module.active)
        pl_module.stop_requested |= self.stop_requested

    def on_target_end(self, trainer: Trainer, module: Inverter, row: Inversion) -> None:
        """Note when it was exact."""
        if row.exact:
            self.exact_after[row.target_id] = self.seconds

    def _show(self, slots: Sequence[Slot]) -> None:
        if self._on_progress is not None:
            for slot in {slot.target.group: slot for slot in slots}.values():
                self._on_progress(self._progress(slot))

    def _progress(self, slot: Slot) -> Progress:
        best, lm = self._best[slot.target.group], slot.tokens.lm
        return Progress(
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

    @contextmanager
    def stop_on_ctrl_c(self) -> Iterator[None]:
        """Let the first Ctrl-C end the run after its step, and the second stop at once.

        Lightning would end the whole program.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # whoever owns the main thread handles signals
            return
        previous = signal.getsignal(signal.SIGINT)

        def request_stop(signum: int, frame: FrameType | None) -> None:
            self.stop_requested = True
            signal.signal(signal.SIGINT, previous)

        signal.signal(signal.SIGINT, request_stop)
        try:
            yield
        except SystemExit as ended:
            if self.stop_requested:  # a second Ctrl-C, of which Lightning makes an exit code of 1
                raise KeyboardInterrupt from ended
            raise
        finally:
            signal.signal(signal.SIGINT, previous)
