r"""Named sets of tokens, and sets from a file: what `model.allowed_tokens` can be.

===============  ================================================================================
name             tokens
===============  ================================================================================
`all`            all that the tokenizer has
`no_special`     no special tokens (BoS, EoS, chat markers and whatever is flagged as special)
`ascii`          of those, the ones whose text alone is ASCII
`printable`      of those, the ones whose text alone is printable, with no half of a character in it
`round_trip`     those whose text alone encodes to that very token
===============  ================================================================================

A file has one token a line: a number is an id, a line in double quotes is a text as JSON writes it
(`" the"`, `"\n"`, `"7"`), any other line is a text as it stands. A text stands for every token that
reads so when it is decoded alone; empty lines are skipped.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM

TokenSetName = Literal["all", "no_special", "ascii", "printable", "round_trip"]
AllowedTokens = TokenSetName | str  # or a file

_LONGEST_ID = 18  # digits; Python refuses to read thousands of them
REPLACEMENT = "\ufffd"  # what bytes that are no whole character decode to


def check_allowed_tokens(allowed_tokens: AllowedTokens) -> None:
    """Raise `InputError` unless it is the name of a set, or a file."""
    if allowed_tokens not in get_args(TokenSetName) and not Path(allowed_tokens).is_file():
        names = ", ".join(get_args(TokenSetName))
        raise InputError(
            f"Expected `model.allowed_tokens` to be one of {names}, or a text file with a token a "
            f"line, but got {allowed_tokens!r}."
        )


def special_ids(lm: FrozenLM) -> set[int]:
    """Special tokens: those with a role, and those that were added as special."""
    added = lm.tokenizer.added_tokens_decoder.items()
    return {*lm.tokenizer.all_special_ids, *(i for i, token in added if token.special)}


def select_tokens(lm: FrozenLM, ids: Sequence[int], allowed: AllowedTokens) -> list[int]:
    """Those of an LM's ids that are in a set, which is a name or a file."""
    if allowed == "all":
        return list(ids)
    texts = [lm.decode([token_id]) for token_id in ids]
    if allowed == "round_trip":
        encoded: list[list[int]] = lm.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [i for i, again in zip(ids, encoded, strict=True) if again == [i]]
    if allowed not in get_args(TokenSetName):
        chosen = _read_tokens(lm, Path(allowed), dict(zip(ids, texts, strict=True)))
        return [i for i in ids if i in chosen]
    barred, belongs = special_ids(lm), _BY_TEXT[allowed]
    return [i for i, text in zip(ids, texts, strict=True) if i not in barred and belongs(text)]


_BY_TEXT: dict[str, Callable[[str], bool]] = {
    "no_special": lambda text: True,
    "ascii": lambda text: text != "" and text.isascii(),
    "printable": lambda text: text != "" and text.isprintable() and REPLACEMENT not in text,
}


def _read_tokens(lm: FrozenLM, path: Path, texts: dict[int, str]) -> set[int]:
    """The ids that a file names, each checked to be one of `texts`."""
    by_text: dict[str, list[int]] = {}
    for token_id, text in texts.items():
        by_text.setdefault(text, []).append(token_id)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"Expected `model.allowed_tokens` to be a text file, but {path} is not ({error})."
        ) from error
    chosen: set[int] = set()
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line:
            continue
        if line.isdecimal() and len(line) <= _LONGEST_ID:
            found = [int(line)] if int(line) in texts else []
        else:
            found = by_text.get(_unquoted(line), [])
        if not found:
            raise InputError(
                f"Expected {path}, line {number}, to be the id or the text of a token of "
                f"{lm.name}, but got {line[:80]!r}."
            )
        chosen.update(found)
    return chosen


def _unquoted(line: str) -> str:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):  # too deep, or too long a number
        return line
    return text if isinstance(text, str) else line
