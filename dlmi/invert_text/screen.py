"""How a search looks while it runs, and what it found.

Progress goes to stderr, so that stdout holds the result and nothing else. Model text is only ever
shown through `visible`, and never as rich markup.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dlmi.invert_text.progress import Progress
from dlmi.metrics import lcs_members
from dlmi.rows import Inversion
from dlmi.text import clock, visible


@contextmanager
def search_screen(line_seconds: float = 10.0) -> Iterator[Callable[[Progress], None]]:
    """What shows progress: live lines on a terminal; elsewhere a plain line now and then."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            yield lambda progress: live.update(_block(progress), refresh=True)
        return
    next_line = 0.0

    def show(progress: Progress) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + line_seconds
            text = f"{_state(progress)}: {visible(progress.prompt_text)}"
            console.print(text, soft_wrap=True)

    yield show


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
    pairs = zip(tokens, lcs_members(target_ids, output_ids), strict=True)
    return Text.assemble(*((visible(text), "green" if right else "red") for text, right in pairs))


def print_found(row: Inversion) -> None:
    """The result, line by line, on stdout."""
    pasted = "the same" if row.round_trips else f"honest LCS {row.round_trip_lcs:.2f}"
    verdict = "exact" if row.exact else "best effort"
    found = f"{row.method}, N={len(row.prompt_ids)}, {row.steps} steps, {row.seconds:.1f} s"
    lines = {
        "text": Text(visible(row.target_text)),
        "prompt": Text(visible(row.prompt_text), "cyan"),
        "prompt ids": Text(" ".join(map(str, row.prompt_ids))),
        **({"to paste": Text(visible(row.full_text))} if row.full_text else {}),
        "the LM says": _marked(row.target_ids, row.output_ids, row.output_tokens),
        "when pasted": Text(pasted),
        "honest LCS": Text(f"{row.lcs:.2f}, {verdict}", "green" if row.exact else "yellow"),
        "found by": Text(found + (", interrupted" if row.stop_reason == "interrupted" else "")),
    }
    for name, line in lines.items():
        Console(highlight=False).print(Text.assemble((f"{name:<12}", "bold"), line), soft_wrap=True)
