"""How prompts and their frames lie in the rows of a pass.

Rows may have fixed tokens of different number. Under teacher forcing all run as one batch, padded
on the right, which a causal LM does not see, and the head runs only where each row's own target is
predicted. A free run goes on from the end of its prompt, so rows of different length run apart.

Axes: R rows, N learned tokens, P tokens of a prompt in its frame, T of a row with its target,
M target tokens, V logits, d width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dlmi.frames import Example, common_beginning
from dlmi.lm import FrozenLM, NextEmbeds
from dlmi.losses import target_mask
from dlmi.prefix import Prefix

Rows = slice | Tensor


def lay_out(
    lm: FrozenLM, examples: Sequence[Example], prompt_length: int, prompt_bos: bool
) -> "Layout":
    """The layout of rows that read these examples; a batch keeps its own for many steps.

    Args:
        lm: The model.
        examples: R of them.
        prompt_length: Learned tokens of a prompt, N.
        prompt_bos: Put BoS before everything.
    """
    bos_ids = (lm.bos_id,) if prompt_bos else ()
    layout = _lay_out(tuple(examples), prompt_length, bos_ids, lm.device)
    layout.prefix(lm)  # computed here, so that whoever watches the passes sees those of rows alone
    return layout


@functools.lru_cache(maxsize=16)
def _lay_out(
    examples: tuple[Example, ...],
    prompt_length: int,
    bos_ids: tuple[int, ...],
    device: torch.device,
) -> "Layout":
    return Layout(examples, prompt_length, bos_ids, device)


class Layout:
    """Where everything lies.

    Args:
        examples: What each row reads, R of them.
        prompt_length: N.
        bos_ids: What stands before everything.
        device: Where the tensors are made.

    Attributes:
        target_ids: Padded on the right, (R, M).
        mask: True where a target has a real token, (R, M).
        tokens: Tokens of the longest row that a pass reads, T.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        prompt_length: int,
        bos_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        if any(example.frame.reasoning for example in examples):
            raise RuntimeError("The reasoning of these examples has not been written yet.")
        heads = [example.frame.pieces[0][: example.frame.head] for example in examples]
        head = common_beginning(heads)
        shared = len(head)
        self._prefix_ids = (*bos_ids, *head)
        self._ends: list[int] = []  # P of each row
        fixed, index = [], []
        for example in examples:
            places = [place - shared for place in example.frame.places(prompt_length)]
            row = list(example.frame.full_ids([0] * prompt_length)[shared:])
            self._ends.append(len(row))
            row += example.ids[:-1]
            # The first N of what a row is gathered from are the learned tokens.
            order = [prompt_length + i for i in range(len(row))]
            for learned, place in enumerate(places):
                order[place] = learned
            fixed.append(row)
            index.append(order)
        self.tokens = max(map(len, fixed))
        self._is_bare = all(end == prompt_length for end in self._ends)
        self._is_even = len(set(self._ends)) == 1
        self._fixed_ids = torch.tensor(_padded(fixed), device=device)  # (R, T)
        self._index = torch.tensor(_padded(index), device=device)  # (R, T)
        self.target_ids, self.mask = pad_ids([example.ids for example in examples], device)
        self._ends_tensor = torch.tensor(self._ends, device=device)

    def forced(self, lm: FrozenLM, prompt_embeds: Tensor, rows: Rows) -> Tensor:
        """Teacher-forced logits, (r, M, V), of some rows' prompts, (r, N, d)."""
        target_ids, prefix = self.target_ids[rows], self.prefix(lm)
        if self._is_even:
            return lm.target_logits(self._prompts(lm, prompt_embeds, rows), target_ids, prefix)
        inputs_embeds = self._gather(lm, prompt_embeds, rows, self.tokens)
        ends = self._ends_tensor[rows]
        wanted = ends[:, None] - 1 + torch.arange(target_ids.shape[1], device=ends.device)
        from_end = (self.tokens - wanted).clamp_min(1)  # (r, M); beyond a row's target all is pad
        keep = max(int(from_end.max()), target_ids.shape[1])
        with lm.compiled.paused(), _head_at(lm, from_end):
            return lm.last_logits(inputs_embeds, keep, prefix)

    def free(
        self,
        lm: FrozenLM,
        prompt_embeds: Tensor,
        rows: Rows,
        next_embeds: Callable[[Rows], NextEmbeds] | None = None,
    ) -> Tensor:
        """Logits of free runs, (r, M, V); `next_embeds` says what some of the rows read next."""
        length, prefix = self.target_ids.shape[1], self.prefix(lm)
        parts, order = [], []
        for mine, members in self._even_parts(rows):
            prompts = self._prompts(lm, prompt_embeds[mine], members)
            reads_next = None if next_embeds is None else next_embeds(members)
            parts.append(lm.free_run(prompts, length, reads_next, prefix))
            order.append(mine)
        return _put_back(parts, order)

    def forced_and_greedy(
        self, lm: FrozenLM, prompt_embeds: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Teacher-forced logits, (r, M, V), and greedy ids, (r, M)."""
        prefix = self.prefix(lm)
        logits, output_ids, order = [], [], []
        for mine, members in self._even_parts(rows):
            prompts = self._prompts(lm, prompt_embeds[mine], members)
            forced, greedy = lm.forced_and_greedy(prompts, self.target_ids[members], prefix)
            logits.append(forced)
            output_ids.append(greedy)
            order.append(mine)
        return _put_back(logits, order), _put_back(output_ids, order)

    def prefix(self, lm: FrozenLM) -> Prefix | None:
        """What all rows start with, where that is anything."""
        return lm.prefix(self._prefix_ids) if self._prefix_ids else None

    def _prompts(self, lm: FrozenLM, prompt_embeds: Tensor, rows: Rows) -> Tensor:
        """Prompts in their frames, (r, P, d), of rows that are equally long."""
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
