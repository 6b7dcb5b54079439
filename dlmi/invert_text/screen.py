"""Shows a search and its result in the terminal.

Progress goes to stderr and the result to stdout. Text of a model is shown through `visible` or
quoted, and never as rich markup.
"""

import logging
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dlmi.invert_text.progress import OnProgress, Progress
from dlmi.metrics import lcs_members
from dlmi.rows import Inversion
from dlmi.text import clock, counted, visible


@contextmanager
def search_screen(line_seconds: float = 10.0) -> Iterator[OnProgress]:
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
    steps = counted(row.steps, "step")
    found = f"{row.method}, N={len(row.prompt_ids)}, {steps}, {row.seconds:.1f} s"
    whole = row.full_text or row.prompt_text
    copied = own_words(row.target_text, row.prompt_text, row.prompt_tokens)
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
    longer = 2 * len(row.prompt_ids)
    tips = {}
    if options["steps"] is not None:
        tips[f"--steps {5 * options['steps']}"] = "more steps"
    if options["seconds"] is not None or not tips:
        seconds = round(5 * (options["seconds"] or max(row.seconds, 60)))
        tips[f"--seconds {seconds}"] = "more time"
    tips |= {
        f"--prompt_length {longer}": "only longer prompts, for all of the budget",
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


def own_words(text: str, prompt: str, tokens: Sequence[str]) -> list[str]:
    """Words and tokens of a prompt that are words of the text, and tokens that resemble them.

    What resembles a word is what `--forbid_target_tokens stems` bars.

    >>> own_words(" The quick Berlin", " quickly, the heimerlyn", [" quick", "ly", " the", " heim"])
    ['the', 'quick']
    """
    own, words, parts = (
        [word for each in texts for word in re.findall(r"\w+", each.casefold())]
        for texts in ([text], [prompt], tokens)
    )
    same = [word for word in words if word in own]
    near = [part for part in parts if any(_is_near(part, word) for word in own)]
    return list(dict.fromkeys([*same, *near]))


def _is_near(part: str, word: str) -> bool:
    """Whether a token's text is a word, or shares at least 3 letters and half of the shorter."""
    shared = SequenceMatcher(None, part, word, autojunk=False).find_longest_match().size
    needed = max(3, (min(len(part), len(word)) + 1) // 2)
    return part == word or (len(word) > 3 and shared >= needed)
