"""The engine: sends the prompts that many slots ask about through the LM together.

Passes of one kind (the same loss, decode and direction) become the rows of one batch, so that the
number of LM calls does not grow with the number of slots. Soft prompts of all slots are embedded in
one product with the embedding matrix. Each row's loss depends on its own prompt alone, so the
gradient is taken where the loss is computed, a few rows at a time: the graph of one cut of rows is
all that is ever held. Variations of a prompt share what they have in common (`shared_prefix`).

Axes: B slots, C prompts of a pass, R rows (prompts x examples), N prompt tokens, M target tokens,
V tokens a prompt may hold, d width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dlmi.estimators.noise import gumbel_noise
from dlmi.estimators.sampling import gumbel_softmax
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.lm.frozen_lm import FrozenLM, NextEmbeds
from dlmi.lm.norm_gradients import scaled_norm_gradients
from dlmi.scoring.batch import Batch, Rows, by_prefix, lay_out
from dlmi.scoring.fluency import Fluency, Score
from dlmi.scoring.losses import target_loss
from dlmi.scoring.passes import REMEMBERED, Account, Cost, Pass, Scores
from dlmi.scoring.prefixes import PrefixStore
from dlmi.scoring.shared_prefix import Variations, score_variations
from dlmi.targets.context import Example
from dlmi.tokens.vocabulary import Vocabulary

_HALF_SCALE = 2.0**12  # lifts gradients above the smallest float16 on their way through the LM
_SPARE_PREFIXES = 8


class Engine:
    """Answers passes.

    Args:
        vocabulary: The LM, and the tokens that its prompts may hold.
        fluency: A penalty on unlikely prompts that is added to every loss.
        norm_gradient_scale: In place of what passes ask for; None: theirs.
        slots: How many slots ask at the same time, at most.

    Attributes:
        lm: The model.
        prefixes: Beginnings whose keys and values are kept.
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
        size = REMEMBERED * slots + _SPARE_PREFIXES
        self.prefixes = PrefixStore(self.lm, size, with_states=fluency is not None)

    # ---- accounts

    def price(self, asked: Pass, account: Account) -> Cost:
        """What a pass costs a slot; notes in its account what it will have read."""
        if asked.like_ids is not None:
            if not self.prefixes.can_share:
                return Cost(sum(v.tokens_read_whole for v in _variations(asked)))
            return Cost(sum(account.learn(v.like_ids) + v.tokens_read for v in _variations(asked)))
        tokens = asked.count * sum(e.tokens_read(asked.length) for e in asked.examples)
        once = self.price_of_prefixes(asked.examples, account, asked.count)
        if not self.prefixes.can_share:
            tokens, once = tokens + once, 0
        return Cost(tokens + once, tokens if asked.has_gradient else 0)

    def price_of_prefixes(
        self, examples: Sequence[Example], account: Account, count: int = 1
    ) -> int:
        """Tokens read for what stands before the prompts: once, or in each of `count` rows."""
        if not self.prefixes.can_share:
            return count * sum(len(example.context.prefix_ids) for example in examples)
        return sum(account.learn(prefix_ids) for prefix_ids in by_prefix(examples))

    # ---- reading

    def __call__(self, passes: Sequence[Pass]) -> list[Scores]:
        """Scores of passes, in their order."""
        kinds: dict[object, list[int]] = {}
        scores: dict[int, Scores] = {}
        for i, asked in enumerate(passes):
            if asked.like_ids is not None:
                scores[i] = self._read_variations(asked)
            else:
                kinds.setdefault(self._kind(asked), []).append(i)
        for members in kinds.values():
            read = self._read([passes[i] for i in members])
            scores.update(zip(members, read, strict=True))
        return [scores[i] for i in range(len(passes))]

    def _kind(self, asked: Pass) -> object:
        """What passes must have in common to be rows of one batch."""
        next_tau = None if asked.next_token is None else asked.next_token.tau
        scale = asked.norm_gradient_scale if asked.has_gradient else 1.0
        decode = (asked.teacher_forcing, next_tau)
        return asked.loss, decode, asked.has_gradient, scale, asked.length

    def _read_variations(self, asked: Pass) -> Scores:
        read = [
            score_variations(self.lm, self.prefixes, v, asked.loss, weights, self._fluency)
            for v, weights in zip(_variations(asked), _weights_of(asked), strict=True)
        ]
        losses = torch.stack([part for part, _ in read]).mean(0)
        return Scores(losses.cpu(), torch.cat([ids for _, ids in read], dim=1).cpu())

    def _read(self, passes: Sequence[Pass]) -> list[Scores]:
        """Passes of one kind."""
        embeds = self._embeds(passes)  # (C, N, d) each
        prompts = torch.cat(embeds)
        examples: list[Example] = []
        owners: list[int] = []  # whose prompt each row is
        weights: list[Tensor | None] = []
        first = 0
        for asked in passes:
            for prompt in range(first, first + asked.count):
                examples += asked.examples
                owners += [prompt] * len(asked.examples)
                weights += _weights_of(asked)
            first += asked.count
        parts, order = [], []
        for prefix_ids, rows in by_prefix(examples).items():
            chosen = [owners[row] for row in rows]
            is_all = chosen == list(range(len(prompts)))
            reads_next = self._next_embeds(passes, chosen)
            losses, output_ids = self._row_losses(
                passes[0],
                prompts if is_all else prompts[chosen],
                tuple(examples[row] for row in rows),
                [weights[row] for row in rows],
                prefix_ids,
                reads_next,
            )
            parts.append(losses)
            order += [(row, ids) for row, ids in zip(rows, output_ids, strict=True)]
        losses = torch.cat(parts)
        if len(parts) > 1:
            places = torch.tensor([row for row, _ in order], device=losses.device)
            losses = losses[places.argsort()]
        said = dict(order)
        gradients = self._token_gradients(passes, embeds, losses)
        scores, start = [], 0
        for asked, gradient in zip(passes, gradients, strict=True):
            width = len(asked.examples)
            own = losses[start : start + asked.count * width].view(asked.count, width)
            rows_of = range(start, start + asked.count * width)
            ids = [said[row][: len(examples[row].ids)] for row in rows_of]
            output_ids = torch.cat(ids).view(asked.count, -1)
            mean = own.mean(1) if width > 1 else own[:, 0]
            start += asked.count * width
            if not asked.has_gradient or gradient is not None:
                mean, output_ids = mean.detach().cpu(), output_ids.cpu()
            scores.append(Scores(mean, output_ids, gradient))
        return scores

    def _embeds(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Prompts as the LM reads them, (C, N, d); with a penalty, products with its matrix."""
        soft = [i for i, asked in enumerate(passes) if isinstance(asked.prompts, SoftPrompt)]
        prompts = [p.prompts for p in passes if isinstance(p.prompts, SoftPrompt)]
        made = dict(zip(soft, soft_embeds(prompts, self._matrix), strict=True))
        for i, asked in enumerate(passes):
            if isinstance(asked.prompts, SoftPrompt):
                continue
            rows = asked.prompts
            if not rows.is_floating_point():
                ids = rows.to(self.lm.device)
                rows = self.lm.embed(ids) if self._fluency is None else self._fluency.rows(ids)
                rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
                if asked.token_gradient:
                    rows = rows.detach().clone().requires_grad_()
            made[i] = rows
        return [made[i] for i in range(len(passes))]

    def _row_losses(
        self,
        kind: Pass,
        prompt_embeds: Tensor,
        examples: tuple[Example, ...],
        token_weights: list[Tensor | None],
        prefix_ids: tuple[int, ...],
        next_embeds: "RowNextEmbeds | None",
    ) -> tuple[Tensor, Tensor]:
        """Losses, (R,), and what was decoded, (R, M), of rows that begin with one prefix."""
        lm = self.lm
        batch: Batch = lay_out(examples, kind.length, lm.device)
        kept = self.prefixes.read(prefix_ids)
        prefix = None if kept is None else kept.prefix
        weights = batch.mask
        if any(own is not None for own in token_weights):
            weights = weights.to(prompt_embeds.dtype)
            for row, own in enumerate(token_weights):
                if own is not None:
                    weights[row, : len(own)] = own.to(weights)

        def reads_next(rows: Rows) -> NextEmbeds:
            assert next_embeds is not None
            return lambda logits, step: next_embeds(rows, logits, step)

        def score(embeds: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            if kind.teacher_forcing:
                logits = batch.forced(lm, embeds, rows, prefix)
            else:
                chosen = None if next_embeds is None else reads_next
                logits = batch.free(lm, embeds, rows, prefix, chosen)
            losses = target_loss(kind.loss, logits, batch.target_ids[rows], weights[rows])
            return losses, logits.detach().argmax(-1)

        width = batch.target_ids.shape[1]
        fluency = self._fluency
        final: Score = score if fluency is None else fluency.added_to(score, width - 1)
        scale = kind.norm_gradient_scale if self._scale is None else self._scale
        with scaled_norm_gradients(lm, scale if kind.has_gradient else 1.0):
            result: tuple[Tensor, Tensor] = _RowLosses.apply(
                prompt_embeds, lm, final, batch.tokens, width
            )  # type: ignore[no-untyped-call]
        return result

    def _next_embeds(self, passes: Sequence[Pass], owners: Sequence[int]) -> "RowNextEmbeds | None":
        """Draws the relaxed next token of free runs, (r, 1, V) logits to (r, 1, d)."""
        if passes[0].next_token is None:
            return None
        tau, index = passes[0].next_token.tau, torch.tensor(owners, device=self.lm.device)

        def next_embeds(rows: Rows, logits: Tensor, step: int) -> Tensor:
            # The noise of all prompts, then some rows of it: they need not be whole slots.
            noise = [
                gumbel_noise(
                    asked.next_token.seed,
                    (asked.count, 1, logits.shape[-1]),
                    logits.device,
                    logits.dtype,
                    step,
                )
                for asked in passes
                if asked.next_token is not None
            ]
            relaxed = gumbel_softmax(
                logits, logits.new_tensor([tau]), torch.cat(noise)[index[rows]]
            )
            matrix = self.lm.embedding_matrix[: relaxed.shape[-1]]
            embeds: Tensor = relaxed @ matrix.to(relaxed.dtype)
            return embeds

        return next_embeds

    def _token_gradients(
        self, passes: Sequence[Pass], embeds: Sequence[Tensor], losses: Tensor
    ) -> list[Tensor | None]:
        """Gradients with respect to one-hot rows, (N, V), from one product with the matrix."""
        asking = [i for i, asked in enumerate(passes) if asked.token_gradient]
        if not asking:
            return [None] * len(passes)
        counts = [asked.count * len(asked.examples) for asked in passes]
        parts = torch.split(losses, counts)
        total = torch.stack([parts[i].mean() for i in asking]).sum()
        by_embeds = torch.autograd.grad(total, [embeds[i] for i in asking])
        rows = torch.cat(by_embeds)  # (B, N, d)
        by_token = rows @ self._matrix.to(rows.dtype).T  # (B, N, V)
        found = dict(zip(asking, by_token, strict=True))
        return [found.get(i) for i in range(len(passes))]


# Draws what a free run of some of the rows reads next: the rows, a step's logits and its index.
RowNextEmbeds = Callable[[Rows, Tensor, int], Tensor]


def _variations(asked: Pass) -> list[Variations]:
    """How the prompts of a pass are read with each of its examples; planned once."""
    planned: list[Variations] | None = asked.__dict__.get("_variations")
    if planned is None:
        assert isinstance(asked.prompts, Tensor)
        assert asked.like_ids is not None
        planned = [Variations.of(asked.prompts, asked.like_ids, e) for e in asked.examples]
        asked.__dict__["_variations"] = planned
    return planned


def _weights_of(asked: Pass) -> list[Tensor | None]:
    """The weights of a pass by example."""
    if asked.token_weights is None:
        return [None] * len(asked.examples)
    return list(torch.split(asked.token_weights, [len(e.ids) for e in asked.examples]))


class _RowLosses(torch.autograd.Function):
    """Losses of rows; the forward pass already holds their gradients."""

    @staticmethod
    def forward(
        ctx: Any, embeds: Tensor, lm: FrozenLM, score: Score, tokens: int, target_length: int
    ) -> tuple[Tensor, Tensor]:
        wants_gradient: bool = ctx.needs_input_grad[0]
        losses = embeds.new_empty(len(embeds))
        output_ids = torch.empty(
            len(embeds), target_length, dtype=torch.int64, device=embeds.device
        )
        gradients = torch.empty_like(embeds) if wants_gradient else None
        scale = _HALF_SCALE if torch.float16 in (lm.dtype, lm.precision.dtype) else 1.0

        def work(rows: slice) -> None:
            with torch.set_grad_enabled(wants_gradient):
                part = embeds[rows].detach().requires_grad_(wants_gradient)
                row_losses, output_ids[rows] = score(part, rows)
                losses[rows] = row_losses.detach()
                if gradients is not None:
                    [gradient] = torch.autograd.grad(row_losses.sum() * scale, part)
                    gradients[rows] = gradient / scale

        lm.rows_per_pass.run(lm, len(embeds), tokens, target_length, work, wants_gradient)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(output_ids)
        return losses, output_ids

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradients * by_loss[:, None, None], None, None, None, None
