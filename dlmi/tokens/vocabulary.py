"""The tokens that a run's prompts may hold, and their embeddings.

A column of Z is a token. Tokens that no prompt of the run may hold (`model.allowed_tokens`) have no
column, so Z is smaller and a step faster. Tokens that only the prompt of one target may not hold
(`model.forbid_target_tokens`) keep their columns, as all slots have the same shapes, and are
barred: a logit of -inf has weight 0 and gradient 0, so it stays barred under any optimiser.

Axes: V tokens a prompt may hold, d width, K barred columns, C prompts, N prompt tokens.
"""

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.target import Target
from dlmi.tokens.forbidden import Forbidden, ForbiddenTokens
from dlmi.tokens.round_trip import repair, round_trips
from dlmi.tokens.token_sets import AllowedTokens, select_tokens

_PREFERRED, _RANDOM = 16, 48  # alternatives of a position, for a repair


def token_sets_of(allowed: AllowedTokens | None, own: Sequence[str]) -> list[AllowedTokens]:
    """The sets that a prompt's tokens must be in: the user's choice and the method's own.

    An explicit `all` lifts the method's sets, except that special tokens stay excluded.

    >>> token_sets_of(None, ("ascii", "printable")), token_sets_of("all", ("ascii", "printable"))
    (['ascii', 'printable'], ['all', 'no_special'])
    """
    if allowed is None:
        return list(own)
    if allowed == "all":
        own = ["no_special"] if own else []
    return list(dict.fromkeys([allowed, *own]))


class Vocabulary:
    """The tokens of a run by column.

    Args:
        lm: The LM that they belong to.
        token_sets: Sets that a token must be in, each a name or a file (`dlmi.tokens.token_sets`).
        forbid_target_tokens: What the prompt of a target may not hold (`dlmi.tokens.forbidden`).
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
        self.must_round_trip = "round_trip" in token_sets  # a prompt (`dlmi.tokens.round_trip`)
        self.token_ids = torch.tensor(ids, device=lm.device)  # of each column, ascending, (V,)
        whole = lm.embedding_matrix
        self.matrix = whole if len(ids) == len(whole) else whole[self.token_ids]  # (V, d)
        self._forbidden = Forbidden(lm, ids, forbid_target_tokens)

    def __len__(self) -> int:
        return len(self.token_ids)

    def ids(self, columns: Tensor) -> Tensor:
        """Columns to token ids, of any shape."""
        return self.token_ids.to(columns.device)[columns]

    def columns(self, ids: Tensor) -> Tensor:
        """The inverse of `ids`."""
        return torch.searchsorted(self.token_ids.to(ids.device), ids.contiguous())

    def for_target(self, target: Target, key: int) -> "TargetTokens":
        """The tokens that the prompt of one target may hold; `key` seeds its repairs."""
        return TargetTokens(self, target, key)

    def barred_columns(self, target: Target) -> Tensor:
        """Columns that the prompt of a target may not use, (K,)."""
        barred = sorted(self._forbidden.columns(target))
        return torch.tensor(barred, dtype=torch.int64, device=self.token_ids.device)

    def check_targets(self, targets: Sequence[Target]) -> None:
        """Raise `InputError` for a target that bars every token."""
        for target in targets:
            if len(self.barred_columns(target)) == len(self):
                raise InputError(
                    f"Expected target {target.id} to leave at least 1 token for its prompt, but "
                    f"`model.forbid_target_tokens: {self._forbidden.kind}` bars all {len(self)} "
                    "of `model.allowed_tokens`. Allow more tokens."
                )

    def fingerprint(self) -> str:
        """A short hash of the tokens: a file may change and keep its name."""
        ids = ",".join(str(token_id) for token_id in self.token_ids.tolist())
        return hashlib.sha256(ids.encode()).hexdigest()[:16]


class TargetTokens:
    """The tokens of a vocabulary that the prompt of one target may hold."""

    def __init__(self, vocabulary: Vocabulary, target: Target, key: int) -> None:
        self.lm = vocabulary.lm
        self.vocabulary = vocabulary
        self.target = target
        self.must_round_trip = vocabulary.must_round_trip
        self.ids, self.columns = vocabulary.ids, vocabulary.columns
        self._key = key
        # Of many examples the first: the texts around the blanks are mostly the same.
        self._context = target.examples[0].context

    @functools.cached_property
    def barred_columns(self) -> Tensor:
        """Columns that the prompt may not use, (K,)."""
        return self.vocabulary.barred_columns(self.target)

    @functools.cached_property
    def allowed_columns(self) -> Tensor:
        """The other columns, (V - K,)."""
        is_allowed = torch.ones_like(self.vocabulary.token_ids, dtype=torch.bool)
        is_allowed[self.barred_columns] = False
        return is_allowed.nonzero()[:, 0]

    @functools.cached_property
    def _allowed_ids_on_host(self) -> Tensor:
        return self.ids(self.allowed_columns).cpu()

    @functools.cached_property
    def _allowed_ids(self) -> frozenset[int]:
        return frozenset(self._allowed_ids_on_host.tolist())

    def allows(self, token_id: int) -> bool:
        """Whether the prompt may hold a token."""
        return token_id in self._allowed_ids

    def bar_(self, logits: Tensor) -> Tensor:
        """Set the logits, (..., V), of barred columns to -inf, in place."""
        return logits.index_fill_(-1, self.barred_columns.to(logits.device), -torch.inf)

    def argmax_ids(self, logits: Tensor) -> Tensor:
        """The allowed ids of largest logits, (N, V) to (N,), repaired if they must round-trip."""
        logits = self._barred(logits.detach())
        return self.repaired(self.ids(logits.argmax(-1))[None], logits)[0]

    def random_ids(self, count: int, length: int, rng: torch.Generator) -> Tensor:
        """Prompts of tokens drawn uniformly from those that are allowed, (C, N), on the CPU."""
        allowed_ids = self._allowed_ids_on_host
        return allowed_ids[torch.randint(len(allowed_ids), (count, length), generator=rng)]

    def round_trips(self, ids: Sequence[int]) -> bool:
        """Whether the text of a prompt in its context encodes to the same ids."""
        return all(round_trips(self.lm, [ids], self._context))

    def surviving(self, ids: Tensor) -> Tensor:
        """The prompts that round-trip, (C, N) to (C', N), found in one call of the tokenizer."""
        keep = round_trips(self.lm, ids.tolist(), self._context)
        return ids[torch.tensor(keep, dtype=torch.bool, device=ids.device)]

    def repaired(self, ids: Tensor, preferences: Tensor | None = None) -> Tensor:
        """Prompts, (C, N), each changed until it round-trips, where that is a must.

        A prompt that cannot be repaired stays as it is. Repairs are deterministic. `preferences`
        are logits of the tokens at each position, (N, V), whose largest are tried before random
        tokens.
        """
        if not self.must_round_trip:
            return ids
        rows: list[list[int]] = ids.tolist()
        survive = round_trips(self.lm, rows, self._context)
        alternatives = [] if all(survive) else self._alternatives(ids.shape[1], preferences)
        for number, row in enumerate(rows):
            if not survive[number]:
                rows[number] = repair(self.lm, self._context, row, alternatives, self.allows)
        return ids.new_tensor(rows)

    def _alternatives(self, length: int, preferences: Tensor | None) -> list[list[int]]:
        """Token ids to try at each position, in order."""
        allowed = self.allowed_columns.cpu()
        rng = torch.Generator().manual_seed(self._key)
        columns = allowed[torch.randint(len(allowed), (length, _RANDOM), generator=rng)]
        if preferences is not None:
            count = min(_PREFERRED, len(allowed))
            preferred = self._barred(preferences.detach()).topk(count, dim=-1).indices.cpu()
            columns = torch.cat([preferred, columns], dim=1)
        ids: list[list[int]] = self.ids(columns).tolist()
        return ids

    def _barred(self, logits: Tensor) -> Tensor:
        """`bar_`, but not in place."""
        return self.bar_(logits.clone()) if len(self.barred_columns) else logits
