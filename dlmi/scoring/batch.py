"""How prompts and their contexts lie in the rows of a pass.

All rows of a batch begin with the same kept prefix. Rows may have fixed tokens of different number.
Under teacher forcing all run as one batch, padded on the right, which a causal LM does not see, and
the head runs only where each row's own target is predicted. A free run goes on from the end of its
prompt, so rows of different length run apart.

Axes: R rows, N prompt tokens, P tokens of a prompt in its context behind the prefix, T of a row
with its target, M target tokens, V logits, d width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dlmi.lm.frozen_lm import FrozenLM, NextEmbeds
from dlmi.lm.prefix import Prefix
from dlmi.scoring.losses import target_mask
from dlmi.targets.context import Example

Rows = slice | Tensor


@functools.lru_cache(maxsize=16)
def lay_out(examples: tuple[Example, ...], prompt_length: int, device: torch.device) -> "Batch":
    """The batch of rows that read these examples; slots use theirs for many steps."""
    return Batch(examples, prompt_length, device)


def by_prefix(examples: Sequence[Example]) -> dict[tuple[int, ...], list[int]]:
    """Which examples begin with the same kept prefix."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, example in enumerate(examples):
        groups.setdefault(example.context.prefix_ids, []).append(i)
    return groups


class Batch:
    """Where everything lies.

    Args:
        examples: What each row reads, R of them; their contexts have the same prefix.
        prompt_length: N.
        device: Where the tensors are made.

    Attributes:
        target_ids: Padded on the right, (R, M).
        mask: True where a target has a real token, (R, M).
        tokens: Tokens of the longest row behind the prefix, T.
    """

    def __init__(
        self, examples: Sequence[Example], prompt_length: int, device: torch.device
    ) -> None:
        if any(example.context.reasoning for example in examples):
            raise RuntimeError("The reasoning of these examples has not been written yet.")
        self._ends: list[int] = []  # P of each row
        fixed, index = [], []
        for example in examples:
            context = example.context
            shared = context.read_once
            positions = [p - shared for p in context.positions(prompt_length)]
            row = list(context.text_ids([0] * prompt_length)[shared:])
            self._ends.append(len(row))
            row += example.ids[:-1]
            # The first N of what a row is gathered from are the prompt's tokens.
            order = [prompt_length + i for i in range(len(row))]
            for token, position in enumerate(positions):
                order[position] = token
            fixed.append(row)
            index.append(order)
        self.tokens = max(map(len, fixed))
        self._is_bare = all(end == prompt_length for end in self._ends)
        self._is_even = len(set(self._ends)) == 1
        self._fixed_ids = torch.tensor(_padded(fixed), device=device)  # (R, T)
        self._index = torch.tensor(_padded(index), device=device)  # (R, T)
        self.target_ids, self.mask = pad_ids([example.ids for example in examples], device)
        self._ends_tensor = torch.tensor(self._ends, device=device)

    def forced(
        self, lm: FrozenLM, prompt_embeds: Tensor, rows: Rows, prefix: Prefix | None
    ) -> Tensor:
        """Teacher-forced logits, (r, M, V), of some rows' prompts, (r, N, d)."""
        target_ids = self.target_ids[rows]
        if self._is_even:
            return lm.target_logits(self._prompts(lm, prompt_embeds, rows), target_ids, prefix)
        inputs_embeds = self._gather(lm, prompt_embeds, rows, self.tokens)
        ends = self._ends_tensor[rows]
        wanted = ends[:, None] - 1 + torch.arange(target_ids.shape[1], device=ends.device)
        from_end = (self.tokens - wanted).clamp_min(1)  # (r, M); beyond a row's target all is pad
        keep = max(int(from_end.max()), target_ids.shape[1])
        with _head_at(lm, from_end):
            return lm.last_logits(inputs_embeds, keep, prefix, hooks=True)

    def free(
        self,
        lm: FrozenLM,
        prompt_embeds: Tensor,
        rows: Rows,
        prefix: Prefix | None,
        next_embeds: Callable[[Rows], NextEmbeds] | None = None,
    ) -> Tensor:
        """Logits of free runs, (r, M, V); `next_embeds` says what some of the rows read next."""
        length = self.target_ids.shape[1]
        parts, order = [], []
        for mine, members in self._even_parts(rows):
            prompts = self._prompts(lm, prompt_embeds[mine], members)
            reads_next = None if next_embeds is None else next_embeds(members)
            parts.append(lm.free_run(prompts, length, reads_next, prefix))
            order.append(mine)
        return _put_back(parts, order)

    def forced_and_greedy(
        self, lm: FrozenLM, prompt_embeds: Tensor, rows: Rows, prefix: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        """Teacher-forced logits, (r, M, V), and greedy ids, (r, M)."""
        logits, output_ids, order = [], [], []
        for mine, members in self._even_parts(rows):
            prompts = self._prompts(lm, prompt_embeds[mine], members)
            forced, greedy = lm.forced_and_greedy(prompts, self.target_ids[members], prefix)
            logits.append(forced)
            output_ids.append(greedy)
            order.append(mine)
        return _put_back(logits, order), _put_back(output_ids, order)

    def _prompts(self, lm: FrozenLM, prompt_embeds: Tensor, rows: Rows) -> Tensor:
        """Prompts in their contexts, (r, P, d), of rows that are equally long."""
        if self._is_bare:
            return prompt_embeds
        [end] = set(self._ends_tensor[rows].tolist())
        return self._gather(lm, prompt_embeds, rows, end)

    def _gather(self, lm: FrozenLM, prompt_embeds: Tensor, rows: Rows, tokens: int) -> Tensor:
        fixed_embeds = lm.embed(self._fixed_ids[rows][:, :tokens])
        both = torch.cat([prompt_embeds.to(lm.dtype), fixed_embeds], dim=1)
        index = self._index[rows][:, :tokens, None]
        return both.gather(1, index.expand(-1, -1, both.shape[2]))

    def _even_parts(self, rows: Rows) -> Iterator[tuple[Rows, Rows]]:
        """Parts whose prompts are equally long: places among `rows`, and the rows themselves."""
        if self._is_even:
            yield slice(None), rows
            return
        ends = self._ends_tensor[rows]
        all_rows = torch.arange(len(self._ends), device=ends.device)[rows]
        for end in sorted(set(ends.tolist())):
            [mine] = (ends == end).nonzero(as_tuple=True)
            yield mine, all_rows[mine]


def pad_ids(targets: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids as one tensor padded on the right, (R, M), and the mask of its real tokens."""
    lengths = torch.tensor([len(ids) for ids in targets], device=device)
    width = int(lengths.max())
    rows = [[*ids, *[ids[-1]] * (width - len(ids))] for ids in targets]
    return torch.tensor(rows, device=device), target_mask(lengths, width)


def _padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(map(len, rows))
    return [[*row, *[row[-1]] * (width - len(row))] for row in rows]


def _put_back(parts: Sequence[Tensor], order: Sequence[Rows]) -> Tensor:
    """Parts of rows in the order of the rows."""
    if len(parts) == 1:
        return parts[0]
    places = torch.cat([places for places in order if isinstance(places, Tensor)])
    return torch.cat(list(parts))[places.argsort()]


@contextlib.contextmanager
def _head_at(lm: FrozenLM, from_end: Tensor) -> Iterator[None]:
    """Let the head see other positions of each row: (R, M), counted from the end of a row."""

    def choose(_: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0]  # (R, all or the last positions, d)
        places = (hidden.shape[1] - from_end).to(hidden.device)
        chosen = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
        return chosen, *inputs[1:]

    handle = lm.model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()
