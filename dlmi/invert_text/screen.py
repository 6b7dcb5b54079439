"""How a search looks while it runs, and what it found.

Progress goes to stderr, so that stdout holds the result and nothing else. Model text is only ever
shown through `visible`, and never as rich markup.
"""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dlmi.display import clock, marked_output, visible
from dlmi.invert_text.found import FoundPrompt
from dlmi.invert_text.search import Progress
from dlmi.lm import FrozenLM


class SearchScreen:
    """Live lines on a terminal; elsewhere a plain line now and then.

    Args:
        lm: Whose tokens are shown.
        line_seconds: Seconds between two plain lines.
    """

    def __init__(self, lm: FrozenLM, line_seconds: float = 10.0) -> None:
        self._lm = lm
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
            self._live.update(self._block(progress), refresh=True)
        elif now - self._last_line >= self._line_seconds:
            self._last_line = now
            best = Text.assemble(_state(progress), ": ", visible(progress.prompt_text))
            self._console.print(best, soft_wrap=True)

    def _block(self, progress: Progress) -> Group:
        output = marked_output(self._lm, progress.target_ids, progress.output_ids)
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


def print_found(lm: FrozenLM, found: FoundPrompt) -> None:
    """The result, line by line, on stdout."""
    screen = Console(highlight=False, markup=False)
    verdict = "exact" if found.exact else "best effort"
    lines = {
        "text": Text(visible(found.text)),
        "prompt": Text(visible(found.prompt_text), "cyan"),
        "prompt ids": Text(" ".join(map(str, found.prompt_ids))),
        **({"to paste": Text(visible(found.row.full_text))} if found.row.full_text else {}),
        "the LM says": marked_output(lm, found.row.target_ids, found.output_ids),
        "when pasted": _as_pasted(lm, found),
        "honest LCS": Text(f"{found.lcs:.2f}, {verdict}", "green" if found.exact else "yellow"),
        "found by": Text(
            f"{found.row.method}, N={found.prompt_length}, {found.row.steps} steps, "
            f"{found.seconds:.1f} s{', interrupted' if found.interrupted else ''}"
        ),
    }
    for name, line in lines.items():
        screen.print(Text.assemble((f"{name:<12}", "bold"), line), soft_wrap=True)


def _as_pasted(lm: FrozenLM, found: FoundPrompt) -> Text:
    if found.pasted_output_ids == found.output_ids:
        return Text("the same")
    output = marked_output(lm, found.row.target_ids, found.pasted_output_ids)
    return Text.assemble(output, f" (LCS {found.pasted_lcs:.2f})")
