"""A batch of rows through the LM, a few rows at a time, with the gradient of each row's loss.

Axes: R rows, L tokens of all rows, m target tokens of all rows, C prompts, N prompt tokens, M
target tokens of a row, V logits, d width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmi.lm.frozen_lm import FrozenLM, NextEmbeds
from dlmi.lm.prefix import Layers
from dlmi.scoring.batch import Batch
from dlmi.scoring.fluency import Fluency, reading_states
from dlmi.scoring.losses import LossName, row_losses, token_losses
from dlmi.scoring.prefixes import PrefixStore

_HALF_SCALE = 2.0**12  # lifts gradients above the smallest float16 on their way through the LM


@dataclass(frozen=True, eq=False)
class Reading:
    """How a batch is read."""

    lm: FrozenLM  # the model
    store: PrefixStore  # keeps the beginnings of the rows
    batch: Batch  # the rows
    loss: LossName = "cross_entropy"  # which loss
    weights: Tensor | None = None  # weight of each target token, (m,); None: all the same
    teacher_forcing: bool = True  # feed the targets' own prefixes; else run freely
    # What free runs of some rows read next; None: their greedy tokens
    next_embeds: Callable[[slice], NextEmbeds] | None = None
    # A penalty on the prompts, whose tokens are then products with its matrix
    fluency: Fluency | None = None
    # Is told the keys and values of each row, which then all run packed
    on_layers: Callable[[int, Layers], None] | None = None

    def losses(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of rows, (R,), and what was decoded, (m,), from tokens of prompts, (C * N, d)."""
        readouts = None
        if self.fluency is not None:
            prompts, readouts = self.fluency.split(prompts)
            size = self.batch.rows[0].size
            numbers = [row.prompt for row in self.batch.rows]
            readouts = readouts.view(-1, size, readouts.shape[-1])[numbers]  # (R, N, ..)
        inputs = self.batch.gather(self.lm, prompts)
        result: tuple[Tensor, Tensor] = _RowLosses.apply(inputs, readouts, self)  # type: ignore[no-untyped-call]
        return result

    @property
    def is_packed(self) -> bool:
        """Whether rows of any lengths run together."""
        is_uneven = len(self.batch.groups) > 1 or self.on_layers is not None
        return is_uneven and self.teacher_forcing and self.lm.can_pack

    def cuts(self, wants_gradient: bool, work: Callable[[slice], None]) -> None:
        """Do all rows, as many at a time as can be held."""
        batch = self.batch
        spans = [slice(0, len(batch.rows))] if self.is_packed else batch.groups
        for span in spans:

            def part(cut: slice, first: int = span.start) -> None:
                work(slice(first + cut.start, first + cut.stop))

            rows = span.stop - span.start
            tokens, targets = batch.tokens(span), batch.targets(span)
            length, keep = (-(-(own.stop - own.start) // rows) for own in (tokens, targets))
            self.lm.rows_per_pass.run(
                self.lm, rows, length, keep, part, wants_gradient, self.is_packed
            )

    def score(self, inputs: Tensor, readouts: Tensor | None, rows: slice) -> tuple[Tensor, Tensor]:
        """Losses, (r,), and what was decoded, (..,), of some rows' tokens, (.., d)."""
        watch: AbstractContextManager[list[Tensor]] = nullcontext([])
        if self.fluency is not None:
            watch = reading_states(self.lm)
        with watch as seen:
            logits = self._logits(inputs.to(self.lm.dtype), rows)
        targets = self.batch.targets(rows)
        per_token = token_losses(self.loss, logits, self.batch.target_ids[targets])
        weights = torch.ones_like(per_token)
        if self.weights is not None:
            weights = self.weights[targets].to(per_token)
        index = self.batch.row_of_target[targets] - rows.start
        losses = row_losses(self.loss, per_token, weights, index, rows.stop - rows.start)
        if self.fluency is not None and readouts is not None:
            losses = losses + self.fluency.penalty(self._prompt_states(seen, rows), readouts)
        return losses, logits.detach().argmax(-1)

    def _logits(self, inputs: Tensor, rows: slice) -> Tensor:
        """Logits that predict the target tokens of some rows, one row's after the other's."""
        lm, batch = self.lm, self.batch
        if self.is_packed:
            captures = self.on_layers is not None
            logits, layers = lm.packed_logits(inputs, *batch.packed(rows, self.store), captures)
            for row, own in enumerate(layers, start=rows.start):
                assert self.on_layers is not None
                self.on_layers(row, own)
            return logits
        first = batch.rows[rows.start]
        length, keep = first.length, len(first.example.ids)
        embeds, prefix = inputs.view(-1, length, inputs.shape[-1]), batch.prefix(rows, self.store)
        if self.teacher_forcing:
            return lm.last_logits(embeds, keep, prefix).flatten(0, 1)
        prompts = embeds[:, : length - keep + 1]
        chosen = None if self.next_embeds is None else self.next_embeds(rows)
        return lm.free_run(prompts, keep, chosen, prefix).flatten(0, 1)

    def _prompt_states(self, seen: list[Tensor], rows: slice) -> Tensor:
        """Of the LM's hidden states those before the second to last prompt token, (r, N - 1, h)."""
        states = torch.cat(seen, dim=1).flatten(0, 1)
        starts = [
            self.batch.starts[i] + row.length - row.size - len(row.example.ids) + 1
            for i, row in enumerate(self.batch.rows[rows], start=rows.start)
        ]
        first = torch.tensor(starts, device=states.device) - self.batch.starts[rows.start]
        size = self.batch.rows[rows.start].size
        return states[first[:, None] + torch.arange(size - 1, device=states.device)]


class _RowLosses(torch.autograd.Function):
    """Losses of rows; the forward pass already holds their gradients."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, readouts: Tensor | None, reading: Reading
    ) -> tuple[Tensor, Tensor]:
        lm, batch = reading.lm, reading.batch
        wants_gradient: bool = ctx.needs_input_grad[0]
        losses = inputs.new_empty(len(batch.rows))
        output_ids = torch.empty_like(batch.target_ids)
        given = [inputs] if readouts is None else [inputs, readouts]
        gradients = [torch.empty_like(one) for one in given] if wants_gradient else None
        scale = _HALF_SCALE if torch.float16 in (lm.dtype, lm.precision.dtype) else 1.0

        def work(rows: slice) -> None:
            places = [batch.tokens(rows), rows]
            with torch.set_grad_enabled(wants_gradient):
                parts = [
                    one[place].detach().requires_grad_(wants_gradient)
                    for one, place in zip(given, places, strict=False)
                ]
                row_losses, said = reading.score(
                    parts[0], None if readouts is None else parts[1], rows
                )
                if gradients is not None:
                    found = torch.autograd.grad(row_losses.sum() * scale, parts)
                    for whole, place, part in zip(gradients, places, found, strict=False):
                        whole[place] = part / scale
            losses[rows], output_ids[batch.targets(rows)] = row_losses.detach(), said

        reading.cuts(wants_gradient, work)
        ctx.gradients, ctx.batch = gradients, batch
        ctx.mark_non_differentiable(output_ids)
        return losses, output_ids

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        by_input = ctx.gradients[0] * by_loss[ctx.batch.row_of_token, None]
        by_readout = ctx.gradients[1] * by_loss[:, None, None] if len(ctx.gradients) > 1 else None
        return by_input, by_readout, None
