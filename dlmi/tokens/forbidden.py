"""Tokens that the prompt of a target may not hold, because they would repeat the target.

- `ids`: the target's own tokens.
- `words`: all tokens that equal one of them up to case and surrounding spaces.
- `stems`: in addition, all tokens that nearly contain a word of the target. A token of three or
  more letters is near a word of four or more if they share a run of at least three letters that
  covers at least half of the shorter one.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.target import Target
from dlmi.tokens.token_sets import REPLACEMENT

ForbiddenTokens = Literal["none", "ids", "words", "stems"]

_SHORTEST_RUN = 3
_SHORTEST_WORD = 4


class Forbidden:
    """Finds the columns that a target bars; `token_ids` are the tokens of all columns."""

    def __init__(self, lm: FrozenLM, token_ids: Sequence[int], kind: ForbiddenTokens) -> None:
        self.kind = kind
        self._lm = lm
        self._by_id = {token_id: column for column, token_id in enumerate(token_ids)}
        self._by_word: dict[str, list[int]] = defaultdict(list)
        self._by_stem: dict[str, list[int]] = defaultdict(list)
        self._stems_with: dict[str, list[str]] = defaultdict(list)  # by each run of three letters
        self._near_words: dict[str, set[int]] = {}  # a cache
        if kind in ("words", "stems"):
            for token_id, column in self._by_id.items():
                text = lm.decode([token_id])
                if REPLACEMENT not in text:  # part of a character has no text
                    self._by_word[_word(text)].append(column)
                for stem in _letters(text) if kind == "stems" else ():
                    self._by_stem[stem].append(column)
        for stem in self._by_stem:
            for run in {stem[i : i + _SHORTEST_RUN] for i in range(len(stem) - _SHORTEST_RUN + 1)}:
                self._stems_with[run].append(stem)

    def columns(self, target: Target) -> set[int]:
        """Columns that the prompt of a target may not use."""
        if self.kind == "none":
            return set()
        own_ids = {token_id for example in target.examples for token_id in example.ids}
        barred = {self._by_id[i] for i in own_ids if i in self._by_id}
        if self.kind != "ids":
            words = {_word(self._lm.decode([token_id])) for token_id in own_ids}
            barred.update(*(self._by_word.get(word, ()) for word in words))
        if self.kind == "stems":
            texts = {self._lm.decode(example.ids) for example in target.examples}
            for word in {word for text in texts for word in _letters(text)}:
                barred |= self._near(word)
        return barred

    def _near(self, word: str) -> set[int]:
        """Columns of the tokens that nearly contain a word."""
        if len(word) < _SHORTEST_WORD:
            return set()
        if word not in self._near_words:
            near = set()
            for start in range(len(word) - _SHORTEST_RUN + 1):
                for stem in self._stems_with.get(word[start : start + _SHORTEST_RUN], ()):
                    end = start + max(_SHORTEST_RUN, (min(len(word), len(stem)) + 1) // 2)
                    if end <= len(word) and word[start:end] in stem:
                        near.add(stem)
            self._near_words[word] = {column for stem in near for column in self._by_stem[stem]}
        return self._near_words[word]


def _letters(text: str) -> list[str]:
    """Runs of letters that are long enough to be compared."""
    return re.findall(rf"[^\W\d_]{{{_SHORTEST_RUN},}}", text.casefold())


def _word(text: str) -> str:
    """The text of a token without case and surrounding spaces."""
    return text.strip().casefold()
