"""The engine: sends the prompts that many slots ask about through the LM together.

Passes of one kind (the same loss, decode and direction) become the rows of one batch, so that the
number of LM calls does not grow with the number of slots. Alike rows run as a plain batch, others
as one packed pass without padding; an LM that cannot pack reads alike rows together. Soft prompts
of all slots are embedded in one product with the embedding matrix. All that the device needs to
know goes there in one copy for all slots, and what methods look at comes back in another; losses
with a graph stay on the device.

Axes: B slots, C prompts of a pass, N prompt tokens, m target tokens of all rows, V tokens a prompt
may hold, d width.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmi.estimators.noise import noise_of_rows, row_keys
from dlmi.estimators.sampling import gumbel_softmax
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.norm_gradients import NormGradientScale, scaled_norm_gradients
from dlmi.lm.products import product
from dlmi.lm.transfer import HOST, Arrived, Parcel, moved
from dlmi.scoring.batch import Batch, Row, lay_out, plain_rows, prompt_places
from dlmi.scoring.fluency import Fluency
from dlmi.scoring.passes import NO_SWAP, REMEMBERED, Account, Cost, Pass, Scores
from dlmi.scoring.prefixes import Ids, PrefixStore
from dlmi.scoring.reading import Reading
from dlmi.targets.context import Example, common_beginning
from dlmi.tokens.vocabulary import Vocabulary

_SPARE_PREFIXES = 8


@dataclass(frozen=True)
class _Plan:
    """How passes of one kind are read."""

    passes: Sequence[Pass]
    reading: Reading
    ids: Arrived  # the discrete prompts, (C, N) each
    barred: Arrived | None  # positions and tokens that are no swaps


class Engine:
    """Answers passes.

    Args:
        vocabulary: The LM, and the tokens that its prompts may hold.
        fluency: A penalty on unlikely prompts that is added to every loss.
        norm_gradient_scale: In place of what passes ask for; None: theirs.
        slots: How many slots ask at the same time, at most.

    Attributes:
        lm: The model, in the dtype of measurements.
        prefixes: Its prefixes whose keys and values are kept.
        auto_scale: The factor on gradients at norm layers that `auto` stands for.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        fluency: Fluency | None = None,
        norm_gradient_scale: NormGradientScale | None = None,
        slots: int = 1,
    ) -> None:
        self.lm: FrozenLM = vocabulary.lm
        self._matrix = vocabulary.matrix if fluency is None else fluency.matrix
        self._fluency = fluency
        self._scale = norm_gradient_scale
        self.auto_scale = 1.0
        self._kept = REMEMBERED * slots + _SPARE_PREFIXES
        self.prefixes = PrefixStore(self.lm, self._kept)
        self.read_with(self.lm)

    def read_with(self, lm: FrozenLM) -> None:
        """Make passes with a copy of the LM in another dtype (`dlmi.lm.pass_dtype`)."""
        self._pass_prefixes = self.prefixes if lm is self.lm else PrefixStore(lm, self._kept)

    @property
    def has_copy(self) -> bool:
        """Whether passes are in another dtype than measurements."""
        return self._pass_prefixes.lm is not self.lm

    @property
    def pass_dtype(self) -> str | None:
        """The dtype of passes, where it is another than that of measurements."""
        return self._pass_prefixes.lm.dtype_name if self.has_copy else None

    # ---- what a pass reads, and what that costs

    def price(self, asked: Pass, account: Account) -> Cost:
        """What a pass costs a slot; notes in its account what it will have read."""
        known = account.known_measured if self._is_measured(asked) else account.known
        rows = list(itertools.chain.from_iterable(self._rows(asked, known)))
        tokens = sum(row.length for row in rows)
        prefixes = dict.fromkeys(row.prefix_ids for row in rows)
        once = sum(account.learn(ids, self._is_measured(asked)) for ids in prefixes)
        for ids in self._kept_ids(asked):
            account.learn(ids, self._is_measured(asked))  # read as part of its tokens
        return Cost(tokens + once, tokens if asked.has_gradient else 0)

    def price_of_prefixes(self, examples: Sequence[Example], account: Account) -> int:
        """Tokens that an evaluation reads for the prefixes of these examples."""
        prefixes = [example.context.prefix_ids for example in examples]
        if not self.lm.can_share:
            return sum(map(len, prefixes))
        return sum(account.learn(ids, self.has_copy) for ids in dict.fromkeys(prefixes))

    def _is_measured(self, asked: Pass) -> bool:
        return asked.is_measured and self.has_copy

    def _store(self, asked: Pass) -> PrefixStore:
        """The LM that reads a pass, with its prefixes."""
        return self.prefixes if self._is_measured(asked) else self._pass_prefixes

    def _rows(self, asked: Pass, known: Sequence[Ids] = ()) -> Sequence[tuple[Row, ...]]:
        """The rows of each prompt of a pass; planned once, with what its slot has read before."""
        if "_rows" not in asked.__dict__:
            shares = self.lm.can_share
            if asked.like_ids is not None and self._kept_ids(asked):
                rows = [self._base_rows(asked, known)]
            # A penalty is on whole prompts: it needs the hidden states of all their tokens.
            elif asked.like_ids is not None and shares and self._fluency is None:
                rows = self._varied_rows(asked)
            else:
                rows = [plain_rows(asked.length, asked.examples, shares)] * asked.count
            asked.__dict__["_rows"] = rows
        planned: Sequence[tuple[Row, ...]] = asked.__dict__["_rows"]
        return planned

    def _base_rows(self, asked: Pass, known: Sequence[Ids]) -> tuple[Row, ...]:
        """The rows of a prompt that is no variation: read from where it leaves what is known."""
        rows = []
        for example in asked.examples:
            ids, end = _whole_ids(asked.prompts, example), prompt_places(example, asked.length)[-1]
            shared = max((len(common_beginning([ids, own])) for own in known), default=0)
            start = min(max(shared, len(example.context.prefix_ids)), end)
            rows.append(Row(asked.length, example, ids[:start], start))
        return tuple(rows)

    def _varied_rows(self, asked: Pass) -> list[tuple[Row, ...]]:
        """The rows of variations of a prompt: each is read from its first difference on."""
        assert isinstance(asked.prompts, Tensor)
        assert asked.like_ids is not None
        differs = asked.prompts.ne(asked.like_ids)  # (C, N)
        # Of the prompt itself, the logits of its last token are needed.
        size, end = asked.length, asked.length - 1
        first = torch.where(differs.any(-1), differs.int().argmax(-1), end).tolist()
        if not self.lm.can_pack:  # all as one plain batch
            first = [min(first)] * len(first)
        rows_from: dict[int, list[Row]] = {i: [] for i in first}
        for example in asked.examples:
            starts = prompt_places(example, size)
            prefix_ids = _whole_ids(asked.like_ids, example)[: starts[max(first)]]
            for i, rows in rows_from.items():
                rows.append(Row(size, example, prefix_ids, starts[i]))
        return [tuple(rows_from[i]) for i in first]

    def _kept_ids(self, asked: Pass) -> list[Ids]:
        """All ids in each example of a single prompt that others will vary: they are kept."""
        is_asked = asked.swaps is not None and asked.count == 1  # for its gradient
        is_single = is_asked or (asked.is_base and self._fluency is None)
        is_plain = self._store(asked).lm.precision.dtype is None  # no autocast
        if not (is_single and is_plain and self.lm.can_pack):
            return []
        return [_whole_ids(asked.prompts, example) for example in asked.examples]

    # ---- reading

    def __call__(self, passes: Sequence[Pass]) -> list[Scores]:
        """Scores of passes, in their order."""
        kinds: dict[object, list[int]] = {}
        prefixes: dict[PrefixStore, dict[Ids, None]] = {}
        for i, asked in enumerate(passes):
            kinds.setdefault(self._kind(asked), []).append(i)
            rows = itertools.chain.from_iterable(self._rows(asked))
            known = dict.fromkeys(row.prefix_ids for row in rows if row.start)
            prefixes.setdefault(self._store(asked), {}).update(known)
        parcel = Parcel(self.lm.device)
        plans = [self._plan([passes[i] for i in own], parcel) for own in kinds.values()]
        for store, wanted in prefixes.items():
            store.read(list(wanted), parcel)  # all that are new, together
        scores: dict[int, Scores] = {}
        for members, plan in zip(kinds.values(), plans, strict=True):
            scores.update(zip(members, self._read(plan), strict=True))
        return _on_host(passes, [scores[i] for i in range(len(passes))])

    def _kind(self, asked: Pass) -> object:
        """What passes must have in common to be rows of one batch."""
        next_tau = None if asked.next_token is None else asked.next_token.tau
        scale = asked.norm_gradient_scale if asked.has_gradient else 1.0
        gradient = asked.has_gradient, asked.swaps is not None, bool(self._kept_ids(asked))
        return asked.loss, asked.teacher_forcing, next_tau, scale, gradient, self._store(asked)

    def _plan(self, passes: Sequence[Pass], parcel: Parcel) -> _Plan:
        """How passes of one kind are read; what the device needs for it is put into the parcel."""
        kind, store = passes[0], self._store(passes[0])
        rows = tuple(own for asked in passes for own in self._rows(asked))
        is_fleeting = any(asked.like_ids is not None for asked in passes)
        batch = (Batch if is_fleeting else lay_out)(rows, self.lm.device)
        reading = Reading(
            store,
            batch,
            kind.loss,
            _weights(passes, batch, parcel),
            kind.teacher_forcing,
            None if kind.next_token is None else self._next_embeds(passes, batch),
            self._fluency,
            [ids for asked in passes for ids in self._kept_ids(asked)],
        )
        reading.send(parcel, kind.has_gradient)
        given = [p.prompts for p in passes if isinstance(p.prompts, Tensor)]
        ids = parcel.add(*(own for own in given if not own.is_floating_point()))
        return _Plan(passes, reading, ids, _barred(passes, parcel))

    def _read(self, plan: _Plan) -> list[Scores]:
        """Passes of one kind."""
        passes, reading = plan.passes, plan.reading
        kind, store, places = passes[0], reading.store, reading.batch.on_device
        prompts = self._prompts(plan)  # (C, N, d) each
        scale = kind.norm_gradient_scale if self._scale is None else self._scale
        factor = self.auto_scale if scale == "auto" else scale
        with scaled_norm_gradients(store.lm, factor if kind.has_gradient else 1.0):
            losses, said = reading.losses(torch.cat([own.flatten(0, 1) for own in prompts]))
        losses, said = losses[places.given_rows], said[places.given_targets]
        own_losses = torch.split(losses, [p.count * len(p.examples) for p in passes])
        own_ids = torch.split(said, [p.count * p.target_length for p in passes])
        scores = [
            Scores(own.view(asked.count, -1).mean(1), ids.view(asked.count, -1))
            for asked, own, ids in zip(passes, own_losses, own_ids, strict=True)
        ]
        return scores if kind.swaps is None else self._with_swaps(plan, prompts, scores)

    def _prompts(self, plan: _Plan) -> list[Tensor]:
        """Prompts as the LM reads them, (C, N, d); with a penalty, products with its matrix."""
        passes, ids = plan.passes, iter(plan.ids())
        soft = [p.prompts for p in passes if isinstance(p.prompts, SoftPrompt)]
        made = iter(soft_embeds(soft, self._matrix))
        embed = self.lm.embed if self._fluency is None else self._fluency.rows
        found: list[Tensor] = []
        for asked in passes:
            if isinstance(asked.prompts, SoftPrompt):
                found.append(next(made))
            elif asked.prompts.is_floating_point():
                found.append(asked.prompts)
            else:
                rows = embed(next(ids))
                rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
                is_leaf = asked.swaps is not None
                found.append(rows.detach().clone().requires_grad_() if is_leaf else rows)
        return found

    def _next_embeds(
        self, passes: Sequence[Pass], batch: Batch
    ) -> Callable[[slice, Tensor, int], Tensor]:
        """Draws the relaxed next tokens of free runs, (r, 1, V) logits to (r, 1, d)."""
        asked = [(p.next_token, p.count) for p in passes if p.next_token is not None]
        steps = range(max(row.keep for row in batch.rows))
        made = [row_keys([n.seed], count, steps, self.lm.device) for n, count in asked]
        keys = torch.cat([own.view(2, -1, len(steps), 1) for own in made], dim=1)  # (2, C, M, 1)

        def next_embeds(rows: slice, logits: Tensor, step: int) -> Tensor:
            own, width = keys[:, batch.on_device.owners[rows], step], logits.shape[-1]
            noise = noise_of_rows(own, width, logits.dtype).view_as(logits)
            relaxed = gumbel_softmax(logits, logits.new_full((1,), asked[0][0].tau), noise)
            embeds: Tensor = relaxed @ self.lm.embedding_matrix[:width].to(relaxed.dtype)
            return embeds

        return next_embeds

    def _with_swaps(
        self, plan: _Plan, prompts: Sequence[Tensor], scores: Sequence[Scores]
    ) -> list[Scores]:
        """Scores with the tokens of steepest descent, from one product with the matrix."""
        passes = plan.passes
        wanted = [asked.swaps for asked in passes if asked.swaps is not None]
        total = torch.cat([own.losses for own in scores]).sum()
        gradients = [own.mean(0) for own in torch.autograd.grad(total, list(prompts))]  # (N, d)
        matrix = self._matrix.to(gradients[0].dtype)
        for gradient, swaps in zip(gradients, wanted, strict=True):
            if swaps.momentum:  # on gradients of one-hot rows of length 1
                norms = torch.linalg.vector_norm(product(gradient, matrix.T), dim=-1, keepdim=True)
                gradient /= norms.clamp_min(torch.finfo(norms.dtype).tiny)
            if swaps.carried is not None:
                gradient.lerp_(swaps.carried.to(gradient), swaps.momentum)
        promises = -product(torch.cat(gradients), matrix.T)  # (B * N, V)
        lengths = [asked.length for asked in passes]
        for swaps, own in zip(wanted, torch.split(promises, lengths), strict=True):
            swaps.tokens.bar_(own)
        if plan.barred is not None:
            positions, ids = plan.barred()
            promises[positions, wanted[0].tokens.columns(ids)] = -torch.inf
        most = min(max(swaps.count for swaps in wanted), promises.shape[1])
        gains, columns = promises.topk(most, dim=-1)
        swap_ids = wanted[0].tokens.ids(columns).masked_fill(gains.isneginf(), NO_SWAP)
        return [
            Scores(one.losses.detach(), one.output_ids, ids, gradient if swaps.momentum else None)
            for one, ids, gradient, swaps in zip(
                scores, torch.split(swap_ids, lengths), gradients, wanted, strict=True
            )
        ]


def _whole_ids(prompt: Tensor | SoftPrompt, example: Example) -> Ids:
    """All ids that the LM reads of one discrete prompt, (N,) or (1, N), in its context."""
    assert isinstance(prompt, Tensor)
    return example.context.ids(prompt.flatten().tolist())


def _weights(passes: Sequence[Pass], batch: Batch, parcel: Parcel) -> Arrived | None:
    """Weights of the target tokens of all rows, (m,); None where all are the same."""
    if all(asked.token_weights is None for asked in passes):
        return None
    given = [(asked.token_weights, asked.target_length, asked.count) for asked in passes]
    parts = [(torch.ones(m) if own is None else own).repeat(count) for own, m, count in given]
    weights = torch.cat(parts)
    places = batch.on_host.given_targets
    return parcel.add(torch.empty_like(weights).index_copy_(0, places, weights))


def _barred(passes: Sequence[Pass], parcel: Parcel) -> Arrived | None:
    """Positions of all prompts, concatenated, and tokens that they may not get."""
    barred, first = [], 0
    for asked in passes:
        if asked.swaps is not None and asked.swaps.barred is not None:
            barred.append(asked.swaps.barred + torch.tensor([first, 0]))
        first += asked.length
    return parcel.add(*torch.cat(barred).T) if barred else None


def _on_host(passes: Sequence[Pass], scores: Sequence[Scores]) -> list[Scores]:
    """The scores; what methods look at is on the CPU."""
    held: list[dict[str, Tensor]] = []
    for asked, one in zip(passes, scores, strict=True):
        has_graph = one.losses.requires_grad
        losses = {"values" if has_graph else "losses": one.losses.detach()}
        seen = {**losses, "output_ids": one.output_ids, "swap_ids": one.swap_ids}
        is_seen = not has_graph if asked.is_seen is None else asked.is_seen
        own = seen if is_seen else {}
        held.append({n: t for n, t in {**own, "beside": asked.beside}.items() if t is not None})
    arrived = iter(moved([part for own in held for part in own.values()], HOST))
    made = [{name: next(arrived) for name in own} for own in held]
    return [replace(one, **own) for one, own in zip(scores, made, strict=True)]
