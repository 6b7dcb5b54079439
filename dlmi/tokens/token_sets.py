r"""Named sets of tokens, and sets from a file: the values of `model.allowed_tokens`.

===============  ================================================================================
name             tokens
===============  ================================================================================
`all`            all tokens of the tokenizer
`no_special`     no special tokens (BoS, EoS, chat markers and all that are flagged as special)
`ascii`          of those, the ones whose text alone is ASCII
`printable`      of those, the ones whose text alone is printable, without parts of characters
`round_trip`     those whose text alone encodes to the same token
===============  ================================================================================

A file has one token a line: a number is an id, a line in double quotes is a JSON string (`" the"`,
`"\n"`, `"7"`), any other line is a literal text. A text selects every token that decodes to it.
Empty lines are skipped.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM

TokenSetName = Literal["all", "no_special", "ascii", "printable", "round_trip"]
AllowedTokens = TokenSetName | str  # or a file

REPLACEMENT = "\ufffd"  # the text of bytes that are not a whole character


def check_allowed_tokens(allowed_tokens: AllowedTokens) -> None:
    """Raise `InputError` unless it is the name of a set, or a file."""
    if allowed_tokens not in get_args(TokenSetName) and not Path(allowed_tokens).is_file():
        names = ", ".join(get_args(TokenSetName))
        raise InputError(
            f"Expected `model.allowed_tokens` to be one of {names}, or a text file with a token a "
            f"line, but got {allowed_tokens!r}."
        )


def select_tokens(lm: FrozenLM, ids: Sequence[int], allowed: AllowedTokens) -> list[int]:
    """The ids of an LM that are in a set, given by its name or as a file."""
    if allowed == "all":
        return list(ids)
    texts = [lm.decode([token_id]) for token_id in ids]
    if allowed == "round_trip":
        encoded: list[list[int]] = lm.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [i for i, again in zip(ids, encoded, strict=True) if again == [i]]
    if allowed not in get_args(TokenSetName):
        chosen = _read_tokens(lm, Path(allowed), dict(zip(ids, texts, strict=True)))
        return [i for i in ids if i in chosen]
    added = lm.tokenizer.added_tokens_decoder.items()
    special = {*lm.tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    belongs = _BY_TEXT[allowed]
    return [i for i, text in zip(ids, texts, strict=True) if i not in special and belongs(text)]


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
    by_id = {str(token_id): [token_id] for token_id in texts}
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
        text = line
        if line.startswith('"'):
            with contextlib.suppress(ValueError):
                text = json.loads(line)
        found = by_id.get(line) if line.isdecimal() else by_text.get(text)
        if found is None:
            raise InputError(
                f"Expected {path}, line {number}, to be the id or the text of a token of "
                f"{lm.name}, but got {line[:80]!r}."
            )
        chosen.update(found)
    return chosen
