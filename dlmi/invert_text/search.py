"""The search behind `invert`: runs of growing prompt length, within one budget.

A run inverts all texts that are still open, each from several starts, side by side in slots. The
first exact start of a text ends its other starts, and the last open text ends the run.
"""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from dlmi.callbacks.base import InversionCallback
from dlmi.data import TargetDataModule
from dlmi.evaluation import Evaluation
from dlmi.invert_text.found import FoundPrompt
from dlmi.lm import FrozenLM
from dlmi.quiet_run import run_quietly
from dlmi.results import Inversion
from dlmi.slots import Slot
from dlmi.targets import Target, texts_to_targets
from dlmi.templates import Template

if TYPE_CHECKING:
    from dlmi.inverter import Inverter

MakeInverter = Callable[[int, int], "Inverter"]  # prompt length and steps to a method
NO_STEP_LIMIT = 10**9


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
    lcs: float
    exact: bool
    seconds: float
    seconds_left: float | None


@dataclass(frozen=True)
class _Best:
    """The best prompt of a text so far.

    Attributes:
        evaluation: With the prompt.
        row: The same prompt as its run has reported it, decoded alone; None until then.
        seconds: When that was, since the search began.
    """

    evaluation: Evaluation
    row: Inversion | None = None
    seconds: float = 0.0


class TextSearch:
    """Looks for the prompts of some texts.

    Args:
        lm: The model.
        texts: What it is to say.
        make_inverter: Makes the method for a prompt length and a number of steps.
        lengths: Prompt lengths to try, ascending; each has an equal share of the budget.
        seconds: Budget of time, or None.
        steps: Budget of steps for each start, or None.
        restarts: Starts of each text, side by side.
        on_progress: Called after each step and each evaluation, for each open text.
        template: What stands around each prompt, if anything.

    Attributes:
        stop_requested: Set to end the search after its step.
    """

    def __init__(
        self,
        lm: FrozenLM,
        texts: Sequence[str],
        make_inverter: MakeInverter,
        lengths: Sequence[int],
        seconds: float | None,
        steps: int | None,
        restarts: int,
        on_progress: Callable[[Progress], None] | None = None,
        template: Template | None = None,
    ) -> None:
        self.lm = lm
        self.targets = texts_to_targets(lm, texts, template)
        self.stop_requested = False
        self._make_inverter = make_inverter
        self._lengths = lengths
        self._seconds = seconds
        self._steps = steps
        self._restarts = restarts
        self._on_progress = on_progress
        self._started = 0.0
        self._run_started = 0.0
        self._run_ends = 0.0
        self._first_step_after = 0.0  # seconds from the start of the latest run
        self._best: dict[str, _Best] = {}  # by id of the text's target

    def run(self) -> list[FoundPrompt]:
        """The best prompt of each text, in order.

        Ctrl-C ends the search after its step, and what was found until then is the result; a
        second Ctrl-C stops at once.
        """
        self._started = time.monotonic()
        with self._stop_on_ctrl_c():
            for index, length in enumerate(self._lengths):
                still_open = [t for t in self.targets if not self._is_solved(t.id)]
                if not still_open or self.stop_requested or not self._has_time_for_a_run():
                    break
                self._run_at(length, still_open, runs_left=len(self._lengths) - index)
            return [self._found(target) for target in self.targets]

    def _run_at(self, length: int, targets: Sequence[Target], runs_left: int) -> None:
        left = self._seconds_left()
        self._run_started = time.monotonic()
        self._first_step_after = 0.0
        self._run_ends = float("inf") if left is None else time.monotonic() + left / runs_left
        steps = NO_STEP_LIMIT if self._steps is None else -(-self._steps // len(self._lengths))
        starts = [
            dataclasses.replace(target, id=f"{target.id}#{start}")
            for start in range(self._restarts)
            for target in targets
        ]
        # Nothing here runs long enough to pay for compiling.
        data = TargetDataModule.of(self.lm, starts, batch_size=len(starts), compile=False)
        run_quietly(self._make_inverter(length, steps), data, [_Referee(self)])

    def _found(self, target: Target) -> FoundPrompt:
        best = self._best[target.id]
        assert best.row is not None
        row = dataclasses.replace(best.row, target_id=target.id)
        interrupted = self.stop_requested and not row.exact
        seconds = best.seconds if row.exact else time.monotonic() - self._started
        return FoundPrompt.of_row(self.lm, row, seconds, interrupted)

    # ---- what the referee tells

    def must_stop(self) -> bool:
        """Whether the run is to end after this step."""
        now = time.monotonic()
        self._first_step_after = self._first_step_after or now - self._run_started
        return self.stop_requested or now >= self._run_ends

    def note_evaluation(self, slot: Slot) -> None:
        """Keep the slot's best prompt if it is the best of its text; ties keep the shorter."""
        assert slot.best is not None
        best = self._best.get(text_id(slot.target.id))
        if best is None or slot.best.score > best.evaluation.score:
            self._best[text_id(slot.target.id)] = _Best(slot.best)

    def note_row(self, row: Inversion) -> None:
        """Keep the row if it reports the best prompt of its text."""
        best = self._best[text_id(row.target_id)]
        if best.row is None and best.evaluation.prompt_ids == row.prompt_ids:
            seconds = time.monotonic() - self._started
            self._best[text_id(row.target_id)] = _Best(best.evaluation, row, seconds)

    def show(self, slots: Sequence[Slot], prompt_length: int) -> None:
        """Tell the caller how each text of these slots stands."""
        if self._on_progress is None:
            return
        for slot in {text_id(slot.target.id): slot for slot in slots}.values():
            self._on_progress(self._progress(slot, prompt_length))

    def _progress(self, slot: Slot, prompt_length: int) -> Progress:
        best = self._best[text_id(slot.target.id)].evaluation
        return Progress(
            text=slot.target.text,
            target_ids=slot.target.ids,
            prompt_length=prompt_length,
            step=slot.step,
            prompt_text=self.lm.decode(best.prompt_ids),
            prompt_ids=best.prompt_ids,
            output_text=self.lm.decode(best.output_ids),
            output_ids=best.output_ids,
            lcs=best.lcs,
            exact=best.output_ids == slot.target.ids,
            seconds=time.monotonic() - self._started,
            seconds_left=self._seconds_left(),
        )

    def _is_solved(self, target_id: str) -> bool:
        best = self._best.get(target_id)
        return best is not None and best.row is not None and best.row.exact

    def _has_time_for_a_run(self) -> bool:
        """Whether it would get as far as its first step, as the run before did."""
        left = self._seconds_left()
        return left is None or left > self._first_step_after or not self._best

    def _seconds_left(self) -> float | None:
        if self._seconds is None:
            return None
        return max(0.0, self._started + self._seconds - time.monotonic())

    @contextmanager
    def _stop_on_ctrl_c(self) -> Iterator[None]:
        """Lightning would end the whole program; so the first Ctrl-C only asks the run to end."""
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


class _Referee(InversionCallback):
    """Tells the search how its run stands, and ends what need not go on."""

    def __init__(self, search: TextSearch) -> None:
        self._search = search

    def on_evaluation(self, trainer: Trainer, module: "Inverter", slots: list[Slot]) -> None:
        """Note what was decoded."""
        for slot in slots:
            self._search.note_evaluation(slot)
        self._search.show(slots, module.prompt_length)

    def on_target_end(self, trainer: Trainer, module: "Inverter", row: Inversion) -> None:
        """Note the row; where it is exact, the text's other starts are dropped."""
        self._search.note_row(row)
        if row.exact:
            for slot in module.active:
                if text_id(slot.target.id) == text_id(row.target_id):
                    module.slots[slot.index] = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: "Inverter", *_: Any) -> None:  # type: ignore[override]
        """End the run when its time is up, or when someone asks for it."""
        self._search.show(pl_module.active, pl_module.prompt_length)
        if self._search.must_stop():
            pl_module.stop_requested = True


def text_id(start_id: str) -> str:
    """Whose start it is.

    >>> text_id("text_0#3")
    'text_0'
    """
    return start_id.rpartition("#")[0]
