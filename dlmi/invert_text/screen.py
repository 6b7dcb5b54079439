"""How a search looks while it runs, and what it found.

Progress goes to stderr, so that stdout holds the result and nothing else. Model text is only ever
shown through `visible`, and never as rich markup.
"""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dlmi.invert_text.progress import Progress
from dlmi.metrics import lcs_members
from dlmi.rows import Inversion
from dlmi.text import clock, visible


class SearchScreen:
    """Live lines on a terminal; elsewhere a plain line now and then.

    Args:
        line_seconds: Seconds between two plain lines.
    """

    def __init__(self, line_seconds: float = 10.0) -> None:
        self._line_seconds = line_seconds
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._live: Live | None = None
        self._last_line = float("-inf")

    def __enter__(self) -> "SearchScreen":
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Bring it up to date."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(_block(progress), refresh=True)
        elif now - self._last_line >= self._line_seconds:
            self._last_line = now
            best = Text.assemble(_state(progress), ": ", visible(progress.prompt_text))
            self._console.print(best, soft_wrap=True)


def _block(progress: Progress) -> Group:
    output = _marked(progress.target_ids, progress.output_ids, progress.output_tokens)
    return Group(
        Text(_state(progress), "bold"),
        Text.assemble("  prompt  ", (visible(progress.prompt_text), "cyan")),
        Text.assemble("  output  ", output),
        Text.assemble("  wanted  ", (visible(progress.text), "dim")),
    )


def _state(progress: Progress) -> str:
    left = "" if progress.seconds_left is None else f", at most {clock(progress.seconds_left)} left"
    return (
        f"N={progress.prompt_length}, step {progress.step}, best LCS {progress.lcs:.2f}, "
        f"{clock(progress.seconds)}{left}"
    )


def _marked(target_ids: Sequence[int], output_ids: Sequence[int], tokens: Sequence[str]) -> Text:
    """An output: what belongs to the LCS green, the rest red."""
    members = lcs_members(target_ids, output_ids)
    pairs = zip(tokens, members, strict=True)
    return Text.assemble(*((visible(text), "green" if right else "red") for text, right in pairs))


def print_found(row: Inversion) -> None:
    """The result, line by line, on stdout."""
    screen = Console(highlight=False, markup=False)
    verdict = "exact" if row.exact else "best effort"
    pasted = "the same" if row.round_trips else f"honest LCS {row.round_trip_lcs:.2f}"
    interrupted = ", interrupted" if row.stop_reason == "interrupted" else ""
    lines = {
        "text": Text(visible(row.target_text)),
        "prompt": Text(visible(row.prompt_text), "cyan"),
        "prompt ids": Text(" ".join(map(str, row.prompt_ids))),
        **({"to paste": Text(visible(row.full_text))} if row.full_text else {}),
        "the LM says": _marked(row.target_ids, row.output_ids, row.output_tokens),
        "when pasted": Text(pasted),
        "honest LCS": Text(f"{row.lcs:.2f}, {verdict}", "green" if row.exact else "yellow"),
        "found by": Text(
            f"{row.method}, N={len(row.prompt_ids)}, {row.steps} steps, "
            f"{row.seconds:.1f} s{interrupted}"
        ),
    }
    for name, line in lines.items():
        screen.print(Text.assemble((f"{name:<12}", "bold"), line), soft_wrap=True)
