"""The engine: sends the prompts that many slots ask about through the LM together.

Passes of one kind (the same loss, decode and direction) become the rows of one batch, so that the
number of LM calls does not grow with the number of slots. Rows that are alike run as a plain batch,
others as one packed pass without padding; an LM that cannot pack reads alike rows together. Soft
prompts of all slots are embedded in one product with the embedding matrix. What a method looks at
comes back to the CPU in one copy for all slots; what is large stays where it was made.

Axes: B slots, C prompts of a pass, R rows (prompts x examples), N prompt tokens, M target tokens, m
those of all rows, V tokens a prompt may hold, d width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dlmi.estimators.noise import gumbel_noise
from dlmi.estimators.sampling import gumbel_softmax
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.lm.frozen_lm import FrozenLM, NextEmbeds
from dlmi.lm.norm_gradients import scaled_norm_gradients
from dlmi.lm.prefix import Layers, Prefix
from dlmi.scoring.batch import Batch, Row, lay_out, rows_of_prompt
from dlmi.scoring.fluency import Fluency
from dlmi.scoring.passes import NO_SWAP, REMEMBERED, Account, Cost, Pass, Scores
from dlmi.scoring.prefixes import PrefixStore
from dlmi.scoring.reading import Reading
from dlmi.targets.context import Example
from dlmi.tokens.vocabulary import Vocabulary

_SPARE_PREFIXES = 8


class Engine:
    """Answers passes.

    Args:
        vocabulary: The LM, and the tokens that its prompts may hold.
        fluency: A penalty on unlikely prompts that is added to every loss.
        norm_gradient_scale: In place of what passes ask for; None: theirs.
        slots: How many slots ask at the same time, at most.

    Attributes:
        lm: The model, in the dtype of measurements.
        prefixes: Beginnings whose keys and values are kept, of measurements.
        pass_lm: The same model in the dtype of passes.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        fluency: Fluency | None = None,
        norm_gradient_scale: float | None = None,
        slots: int = 1,
    ) -> None:
        self.lm: FrozenLM = vocabulary.lm
        self._matrix = vocabulary.matrix if fluency is None else fluency.matrix
        self._fluency = fluency
        self._scale = norm_gradient_scale
        self._kept = REMEMBERED * slots + _SPARE_PREFIXES
        self.prefixes = PrefixStore(self.lm, self._kept)
        self.read_with(self.lm)

    def read_with(self, lm: FrozenLM) -> None:
        """Make passes with a copy of the LM in another dtype (`dlmi.lm.pass_dtype`)."""
        self.pass_lm = lm
        self._pass_prefixes = self.prefixes
        if self.has_copy:
            self._pass_prefixes = PrefixStore(lm, self._kept)

    @property
    def has_copy(self) -> bool:
        """Whether passes are in another dtype than measurements."""
        return self.pass_lm is not self.lm

    @property
    def pass_dtype(self) -> str | None:
        """Its name, where it is another."""
        return self.pass_lm.dtype_name if self.has_copy else None

    # ---- what a pass reads, and what that costs

    def price(self, asked: Pass, account: Account) -> Cost:
        """What a pass costs a slot; notes in its account what it will have read."""
        rows = self._rows(asked)
        tokens = sum(row.length for row in rows)
        is_measured = self._is_measured(asked)
        prefixes = dict.fromkeys(row.prefix_ids for row in rows)
        once = sum(account.learn(ids, is_measured) for ids in prefixes)
        if self._keeps_prompt(asked):
            for row in rows:
                account.learn(_whole_ids(asked.prompts, row.example))  # part of its tokens
        return Cost(tokens + once, tokens if asked.has_gradient else 0)

    def price_of_prefixes(self, examples: Sequence[Example], account: Account) -> int:
        """Tokens read for what stands before one prompt in these examples."""
        prefixes = [example.context.prefix_ids for example in examples]
        if not self.lm.can_share:
            return sum(map(len, prefixes))
        return sum(account.learn(ids, self.has_copy) for ids in dict.fromkeys(prefixes))

    def _is_measured(self, asked: Pass) -> bool:
        return asked.is_measured and self.has_copy

    def _rows(self, asked: Pass) -> list[Row]:
        """The rows of a pass, prompt by prompt; planned once."""
        rows: list[Row] | None = asked.__dict__.get("_rows")
        if rows is None:
            can_share, size = self.lm.can_share, asked.length
            rows = []
            for prompt in range(asked.count):
                rows += rows_of_prompt(prompt, size, asked.examples, can_share)
            # A penalty is on whole prompts: it needs what the LM makes of all of their tokens.
            if asked.like_ids is not None and can_share and self._fluency is None:
                rows = self._varied(asked, rows)
            asked.__dict__["_rows"] = rows
        return rows

    def _varied(self, asked: Pass, rows: Sequence[Row]) -> list[Row]:
        """The rows of variations of a prompt: each is read from its first difference on."""
        assert isinstance(asked.prompts, Tensor)
        assert isinstance(asked.like_ids, Tensor)
        differs = asked.prompts.ne(asked.like_ids)  # (C, N)
        # One that is the prompt itself needs the logits of its last token.
        first = torch.where(differs.any(-1), differs.int().argmax(-1), asked.length - 1).tolist()
        if not self.lm.can_pack:  # all as one plain batch
            first = [min(first)] * len(first)
        known: dict[Example, tuple[list[int], tuple[int, ...]]] = {}
        for example in asked.examples:
            positions = example.context.positions(asked.length)
            starts = [len(example.context.start_ids) + positions[i] for i in first]
            known[example] = starts, _whole_ids(asked.like_ids, example)[: max(starts)]
        return [
            replace(row, prefix_ids=prefix_ids, start=starts[row.prompt])
            for row in rows
            for starts, prefix_ids in [known[row.example]]
        ]

    def _keeps_prompt(self, asked: Pass) -> bool:
        """Whether the keys and values of a prompt are kept from the pass for its gradient."""
        is_plain = self.pass_lm.precision.dtype is None  # no autocast
        is_single = asked.swaps is not None and asked.count == 1
        return is_single and self.lm.can_pack and is_plain

    # ---- reading

    def __call__(self, passes: Sequence[Pass]) -> list[Scores]:
        """Scores of passes, in their order."""
        kinds: dict[object, list[int]] = {}
        for i, asked in enumerate(passes):
            kinds.setdefault(self._kind(asked), []).append(i)
        for is_measured in (False, True):
            asked_so = [p for p in passes if self._is_measured(p) == is_measured]
            prefixes = {row.prefix_ids: 0 for p in asked_so for row in self._rows(p) if row.start}
            self._store(is_measured).read(list(prefixes))  # all that are new, together
        scores: dict[int, Scores] = {}
        for members in kinds.values():
            read = self._read([passes[i] for i in members])
            scores.update(zip(members, read, strict=True))
        return _brought_to_host([scores[i] for i in range(len(passes))])

    def _store(self, is_measured: bool) -> PrefixStore:
        return self.prefixes if is_measured else self._pass_prefixes

    def _kind(self, asked: Pass) -> object:
        """What passes must have in common to be rows of one batch."""
        next_tau = None if asked.next_token is None else asked.next_token.tau
        scale = asked.norm_gradient_scale if asked.has_gradient else 1.0
        keeps = self._keeps_prompt(asked)
        way = asked.has_gradient, asked.swaps is not None, keeps, self._is_measured(asked)
        return asked.loss, asked.teacher_forcing, next_tau, scale, way

    def _read(self, passes: Sequence[Pass]) -> list[Scores]:
        """Passes of one kind."""
        kind = passes[0]
        is_measured = self._is_measured(kind)
        lm = self.lm if is_measured else self.pass_lm
        rows, count, tokens = [], 0, 0
        for asked in passes:
            rows += [
                replace(row, prompt=count + row.prompt, first=tokens + row.first)
                for row in self._rows(asked)
            ]
            count, tokens = count + asked.count, tokens + asked.count * asked.length
        is_fleeting = any(asked.like_ids is not None for asked in passes)
        batch = (Batch if is_fleeting else lay_out)(tuple(rows), lm.device)
        prompts = self._prompts(passes)  # (C, N, d) each
        reading = Reading(
            lm,
            self._store(is_measured),
            batch,
            kind.loss,
            self._weights(passes, batch),
            kind.teacher_forcing,
            None if kind.next_token is None else self._next_embeds(passes, batch),
            self._fluency,
            self._kept_prompts(passes, batch) if self._keeps_prompt(kind) else None,
        )
        scale = kind.norm_gradient_scale if self._scale is None else self._scale
        with scaled_norm_gradients(lm, scale if kind.has_gradient else 1.0):
            losses, said = reading.losses(torch.cat([own.flatten(0, 1) for own in prompts]))
        losses, said = losses[batch.places], said[batch.target_places]
        parts = torch.split(losses, [p.count * len(p.examples) for p in passes])
        means = [own.view(p.count, -1).mean(1) for p, own in zip(passes, parts, strict=True)]
        parts = torch.split(said, [p.count * p.target_length for p in passes])
        outputs = [own.view(p.count, -1) for p, own in zip(passes, parts, strict=True)]
        found = self._swaps(passes, prompts, means)
        return [
            Scores(own_means, own_outputs, swap_ids, carried)
            for own_means, own_outputs, (swap_ids, carried) in zip(
                means, outputs, found, strict=True
            )
        ]

    def _prompts(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Prompts as the LM reads them, (C, N, d); with a penalty, products with its matrix."""
        soft = [p.prompts for p in passes if isinstance(p.prompts, SoftPrompt)]
        made = iter(soft_embeds(soft, self._matrix))
        given = [p.prompts for p in passes if isinstance(p.prompts, Tensor)]
        ids = iter(_copied([own for own in given if not own.is_floating_point()], self.lm.device))
        found: list[Tensor] = []
        for asked in passes:
            if isinstance(asked.prompts, SoftPrompt):
                rows = next(made)
            elif asked.prompts.is_floating_point():
                rows = asked.prompts
            else:
                own = next(ids)
                rows = self.lm.embed(own) if self._fluency is None else self._fluency.rows(own)
                rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
                if asked.swaps is not None:
                    rows = rows.detach().clone().requires_grad_()
            found.append(rows)
        return found

    def _weights(self, passes: Sequence[Pass], batch: Batch) -> Tensor | None:
        """Weights of the target tokens of all rows, (m,); None where all are the same."""
        if all(asked.token_weights is None for asked in passes):
            return None
        given = []
        for asked in passes:
            own = asked.token_weights
            given += [torch.ones(asked.target_length) if own is None else own] * asked.count
        weights = torch.cat(given).to(self.lm.device)
        return torch.empty_like(weights).index_copy_(0, batch.target_places, weights)

    def _next_embeds(self, passes: Sequence[Pass], batch: Batch) -> Callable[[slice], NextEmbeds]:
        """Draws the relaxed next tokens of free runs, (r, 1, V) logits to (r, 1, d)."""
        owners = torch.tensor([row.prompt for row in batch.rows], device=self.lm.device)
        asked = [(p.next_token, p.count) for p in passes if p.next_token is not None]

        def of_rows(rows: slice) -> NextEmbeds:
            def next_embeds(logits: Tensor, step: int) -> Tensor:
                # The noise of all prompts, then some rows of it: they need not be whole slots.
                width, like = logits.shape[-1], (logits.device, logits.dtype)
                noise = [gumbel_noise(n.seed, (count, 1, width), *like, step) for n, count in asked]
                tau = logits.new_tensor([asked[0][0].tau])
                relaxed = gumbel_softmax(logits, tau, torch.cat(noise)[owners[rows]])
                embeds: Tensor = relaxed @ self.lm.embedding_matrix[:width].to(relaxed.dtype)
                return embeds

            return next_embeds

        return of_rows

    def _kept_prompts(self, passes: Sequence[Pass], batch: Batch) -> Callable[[int, Layers], None]:
        """Keeps the prompts that are read for their gradient, each the only one of its pass."""

        def keep(row: int, layers: Layers) -> None:
            read = batch.rows[row]
            whole_ids = _whole_ids(passes[read.prompt].prompts, read.example)
            known = self._pass_prefixes.read([read.prefix_ids])[0] if read.start else None
            own_ids = whole_ids[read.start :]
            cut = [(k[:, :, : len(own_ids)], v[:, :, : len(own_ids)]) for k, v in layers]
            self._pass_prefixes.keep(whole_ids, Prefix.joined(known, own_ids, cut))

        return keep

    def _swaps(
        self, passes: Sequence[Pass], prompts: Sequence[Tensor], losses: Sequence[Tensor]
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """The tokens of steepest descent, from one product with the matrix, and what is carried."""
        wanted = [swaps for asked in passes if (swaps := asked.swaps) is not None]
        if not wanted:
            return [(None, None)] * len(passes)
        by_embeds = torch.autograd.grad(torch.cat(list(losses)).sum(), list(prompts))
        gradients = [gradient.mean(0) for gradient in by_embeds]  # (N, d) each
        for gradient, swaps in zip(gradients, wanted, strict=True):
            if swaps.carried is not None:
                gradient += swaps.momentum * swaps.carried.to(gradient.device)
        rows = torch.cat(gradients)  # (B * N, d)
        promises = -(rows @ self._matrix.to(rows.dtype).T)  # (B * N, V)
        lengths = [asked.length for asked in passes]
        barred, first = [], 0
        for swaps, own in zip(wanted, torch.split(promises, lengths), strict=True):
            swaps.tokens.bar_(own)
            if swaps.barred is not None:
                barred.append(swaps.barred + torch.tensor([first, 0]))
            first += len(own)
        if barred:
            positions, ids = torch.cat(barred).to(promises.device).T
            promises[positions, wanted[0].tokens.columns(ids)] = -torch.inf
        most = min(max(swaps.count for swaps in wanted), promises.shape[1])
        gains, columns = promises.topk(most, dim=-1)
        swap_ids = wanted[0].tokens.ids(columns).masked_fill(gains.isneginf(), NO_SWAP)
        carried = [
            own if swaps.momentum else None for own, swaps in zip(gradients, wanted, strict=True)
        ]
        return list(zip(torch.split(swap_ids, lengths), carried, strict=True))


def _whole_ids(prompt: Tensor | SoftPrompt | None, example: Example) -> tuple[int, ...]:
    """All ids that the LM reads of one discrete prompt, (N,) or (1, N), in its context."""
    assert isinstance(prompt, Tensor)
    return example.context.ids(prompt.flatten().tolist())


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Ids on a device, in one copy."""
    if not tensors or all(one.device == device for one in tensors):
        return list(tensors)
    flat = torch.cat([one.flatten() for one in tensors]).to(device)
    parts = torch.split(flat, [one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]


def _brought_to_host(scores: Sequence[Scores]) -> list[Scores]:
    """Scores that nobody descends on, with all that they hold on the CPU, in one copy."""
    is_moved = [not one.losses.requires_grad or one.swap_ids is not None for one in scores]
    held: list[Tensor] = []
    for one, yes in zip(scores, is_moved, strict=True):
        parts = (one.losses.detach(), one.output_ids, one.swap_ids, one.carried)
        held += [part for part in parts if part is not None] if yes else []
    if held and held[0].device.type != "cpu":
        # Ids are exact in float32: there are fewer than 2**24 of them.
        flat = torch.cat([part.flatten().to(held[0].dtype) for part in held]).cpu()
        cuts = torch.split(flat, [part.numel() for part in held])
        held = [new.view(old.shape).to(old.dtype) for new, old in zip(cuts, held, strict=True)]
    back = iter(held)

    def moved(one: Scores) -> Scores:
        losses, output_ids = next(back), next(back)
        swap_ids = None if one.swap_ids is None else next(back)
        return Scores(losses, output_ids, swap_ids, None if one.carried is None else next(back))

    return [moved(one) if yes else one for one, yes in zip(scores, is_moved, strict=True)]
