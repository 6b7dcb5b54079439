"""The tokens that a run's prompts may hold, and what each of them embeds to.

A column of Z stands for a token. What no prompt of the run may hold (`model.allowed_tokens`) has no
column: Z is smaller and a step is faster. What only the prompt of one target may not hold
(`model.forbid_target_tokens`) keeps its column, as slots share their shapes, and is barred there: a
logit of -inf has a weight of exactly 0 and gets a gradient of exactly 0, so it stays barred under
any optimiser.

Axes: V tokens a prompt may hold, d width, K barred columns.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.lm import FrozenLM
from dlmi.targets import Target
from dlmi.token_sets import REPLACEMENT, AllowedTokens, select_tokens, token_texts

ForbiddenTokens = Literal["none", "ids", "words"]


class Vocabulary:
    """Tokens by column.

    Args:
        lm: Whose tokens they are.
        token_sets: Sets that a token must be in, each a name or a file (`dlmi.token_sets`).
        forbid_target_tokens: What the prompt of a target may not hold: `none`, the target's own
            `ids`, or all tokens that read like one of its `words`.

    Attributes:
        lm: The same.
        token_ids: The token of each column, ascending, (V,).
        matrix: What each embeds to, (V, d).
        must_round_trip: Whether prompts must survive decoding and encoding.
    """

    def __init__(
        self,
        lm: FrozenLM,
        token_sets: Sequence[AllowedTokens] = ("all",),
        forbid_target_tokens: ForbiddenTokens = "none",
    ) -> None:
        ids: list[int] = lm.prompt_token_ids.tolist()
        for name in token_sets:
            ids = select_tokens(lm, ids, name)
        if not ids:
            raise InputError(
                f"Expected `model.allowed_tokens` to leave at least 1 token of {lm.name}, but "
                f"{' and '.join(token_sets)} leaves none."
            )
        self.lm = lm
        self.must_round_trip = "round_trip" in token_sets
        self.token_ids = torch.tensor(ids, device=lm.device)
        whole = lm.embedding_matrix
        self.matrix = whole if len(ids) == len(whole) else whole[self.token_ids]
        self._forbid = forbid_target_tokens
        self._column_of = {token_id: column for column, token_id in enumerate(ids)}
        self._by_word = self._words() if forbid_target_tokens == "words" else {}
        self._barred: dict[tuple[int, ...], Tensor] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def ids(self, columns: Tensor) -> Tensor:
        """Columns to token ids, of any shape."""
        return self.token_ids.to(columns.device)[columns]

    def columns(self, ids: Tensor) -> Tensor:
        """The inverse of `ids`."""
        return torch.searchsorted(self.token_ids.to(ids.device), ids)

    def allows(self, token_id: int, target: Target) -> bool:
        """Whether the prompt of a target may hold a token."""
        column = self._column_of.get(token_id)
        return column is not None and not bool((self.barred_columns(target) == column).any())

    def barred_columns(self, target: Target) -> Tensor:
        """Columns that the prompt of a target may not use, (K,)."""
        ids = target.ids_to_say
        if ids not in self._barred:
            barred = sorted({column for i in set(ids) for column in self._barred_by(i)})
            columns = torch.tensor(barred, dtype=torch.int64, device=self.token_ids.device)
            self._barred[ids] = columns
        return self._barred[ids]

    def allowed_columns(self, target: Target) -> Tensor:
        """The other columns, (V - K,)."""
        is_allowed = torch.ones_like(self.token_ids, dtype=torch.bool)
        is_allowed[self.barred_columns(target)] = False
        return is_allowed.nonzero()[:, 0]

    def bar_(self, logits: Tensor, target: Target) -> Tensor:
        """Set the logits, (..., V), of barred columns to -inf, in place."""
        return logits.index_fill_(-1, self.barred_columns(target).to(logits.device), -torch.inf)

    def check_targets(self, targets: Sequence[Target]) -> None:
        """Raise `InputError` for a target that leaves no token for its prompt."""
        for target in targets:
            if len(self.barred_columns(target)) == len(self):
                raise InputError(
                    f"Expected target {target.id} to leave at least 1 token for its prompt, but "
                    f"`model.forbid_target_tokens: {self._forbid}` bars all {len(self)} that "
                    "`model.allowed_tokens` allows. Allow more tokens."
                )

    def fingerprint(self) -> str:
        """A short hash of the tokens: a file may change and keep its name."""
        ids = ",".join(str(token_id) for token_id in self._column_of)
        return hashlib.sha256(ids.encode()).hexdigest()[:16]

    def _barred_by(self, target_id: int) -> Sequence[int]:
        """Columns that one token of a target bars."""
        own = [self._column_of[target_id]] if target_id in self._column_of else []
        if self._forbid == "none":
            return ()
        if self._forbid == "ids":
            return own
        word = _word(self.lm.decode([target_id]))
        return [*own, *([] if word is None else self._by_word.get(word, []))]

    def _words(self) -> dict[str, list[int]]:
        columns: dict[str, list[int]] = {}
        for column, text in enumerate(token_texts(self.lm, self._column_of)):
            if (word := _word(text)) is not None:
                columns.setdefault(word, []).append(column)
        return columns


def _word(text: str) -> str | None:
    """What a token reads like, whatever its case and spaces; None for part of a character."""
    return None if REPLACEMENT in text else text.strip().casefold()
