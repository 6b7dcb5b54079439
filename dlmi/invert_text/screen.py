"""Shows a search and its result in the terminal.

Progress goes to stderr and the result to stdout. Text of a model is shown through `visible` or
quoted, and never as rich markup.
"""

import logging
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dlmi.invert_text.progress import Progress
from dlmi.metrics import lcs_members
from dlmi.rows import Inversion
from dlmi.text import clock, visible


@contextmanager
def search_screen(line_seconds: float = 10.0) -> Iterator[Callable[[Progress], None]]:
    """Gives a function that shows progress: live in a terminal, else a line every few seconds."""
    console = Console(stderr=True, highlight=False, markup=False)
    handler = logging.Handler()
    handler.emit = lambda record: console.print(record.getMessage(), soft_wrap=True)  # type: ignore[method-assign]
    logger = logging.getLogger("dlmi.invert_text")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    next_line = 0.0

    def show_line(progress: Progress) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + line_seconds
            text = f"{_state(progress)}: {visible(progress.prompt_text)}"
            console.print(text, soft_wrap=True)

    try:
        if console.is_terminal:
            with Live(console=console, transient=True, auto_refresh=False) as live:
                yield lambda progress: live.update(_block(progress), refresh=True)
        else:
            yield show_line
    finally:
        logger.removeHandler(handler)


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
    """Tokens of an output, green where they belong to the LCS, else red."""
    pairs = zip(tokens, lcs_members(target_ids, output_ids), strict=True)
    return Text.assemble(*((visible(text), "green" if right else "red") for text, right in pairs))


def print_found(row: Inversion) -> None:
    """Print the result, with the prompt quoted for Python and for a shell."""
    pasted = "the same" if row.round_trips else f"honest LCS {row.round_trip_lcs:.2f}"
    verdict = "exact" if row.exact else "best effort"
    found = f"{row.method}, N={len(row.prompt_ids)}, {row.steps} steps, {row.seconds:.1f} s"
    whole, copied = row.full_text or row.prompt_text, own_words(row.target_text, row.prompt_text)
    lines = {
        "text": Text(repr(row.target_text)),
        "prompt": Text(repr(row.prompt_text), "cyan"),
        **({"whole prompt": Text(repr(whole))} if row.full_text else {}),
        "in a shell": Text(shell_quoted(whole)),
        "prompt ids": Text(" ".join(map(str, row.prompt_ids))),
        "the LM says": Text.assemble(
            '"', _marked(row.target_ids, row.output_ids, row.output_tokens), '"'
        ),
        "when pasted": Text(pasted),
        "own words": Text(visible(", ".join(copied)) or "none"),
        "honest LCS": Text(f"{row.lcs:.2f}, {verdict}", "green" if row.exact else "yellow"),
        "found by": Text(found + (", interrupted" if row.stop_reason == "interrupted" else "")),
    }
    for name, line in lines.items():
        Console(highlight=False).print(Text.assemble((f"{name:<14}", "bold"), line), soft_wrap=True)


def print_advice(row: Inversion, options: Mapping[str, Any]) -> None:
    """Print what to try if the text was not found."""
    text, alone = row.target_text, options["template"] is None and not options["chat"]
    seconds = round(5 * (options["seconds"] or max(row.seconds, 60)))
    longer = 2 * len(row.prompt_ids)
    tips = {
        f"--seconds {seconds}": "more time",
        f"--prompt_length {longer}": "only longer prompts, for all of the time",
        f"--seed {options['seed'] + 1} --restarts 4": "four other starts at the same time",
    }
    if alone and text[0].isalnum():
        tips[f'" {text.strip()[:20]} ..."'] = "with a space first, as in the middle of a line"
    if options["forbid_target_tokens"] != "none":
        tips["--forbid_target_tokens none"] = "the text's own words may be in the prompt"
    console = Console(stderr=True, highlight=False, markup=False)
    console.print("Not found. What to try next:")
    for option, why in tips.items():
        console.print(f"  {visible(option):<28} {why}", soft_wrap=True)


def shell_quoted(text: str) -> str:
    r"""A text as one word on one line of bash or zsh.

    >>> shell_quoted("it's"), shell_quoted(" a\n\xa0")
    ('\'it\'"\'"\'s\'', "$' a\\n\\xc2\\xa0'")
    """
    if text.isprintable():
        return shlex.quote(text)
    named = {"\n": r"\n", "\t": r"\t", "\\": r"\\", "'": r"\'"}
    spelled = (
        named.get(c) or (c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode()))
        for c in text
    )
    return f"$'{''.join(spelled)}'"


def own_words(text: str, prompt: str) -> list[str]:
    """Words of a prompt that are, or resemble, words of the text.

    >>> own_words(" The quick brown fox", " quickly, the Foxes Browne red")
    ['quickly', 'the', 'foxes', 'browne']
    """
    words, targets = (re.findall(r"\w+", each.casefold()) for each in (prompt, text))
    return [word for word in dict.fromkeys(words) if any(_is_near(word, t) for t in targets)]


def _is_near(word: str, target: str) -> bool:
    shared = SequenceMatcher(None, word, target, autojunk=False).find_longest_match().size
    needed = 3 if len(target) == 3 else max(3, (min(len(word), len(target)) + 1) // 2)
    return word == target or shared >= needed
