"""A batch of rows through the LM, a few rows at a time, with the gradient of each row's loss.

Axes: R rows, r some of them, L tokens of all rows, m target tokens of all rows, C prompts, N prompt
tokens, V logits, d width, h width of a hidden state.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmi.lm.transfer import Arrived, Parcel
from dlmi.scoring.batch import Batch
from dlmi.scoring.fluency import Fluency, reading_states
from dlmi.scoring.losses import LossName, row_losses, token_losses
from dlmi.scoring.prefixes import Ids, PrefixStore

_HALF_SCALE = 2.0**12  # lifts gradients above the smallest float16 on their way through the LM


@dataclass(frozen=True, eq=False)
class Reading:
    """How a batch is read."""

    store: PrefixStore  # the LM, and the prefixes of the rows
    batch: Batch  # the rows
    loss: LossName = "cross_entropy"  # which loss
    weights: Arrived | None = None  # weight of each target token, (m,); None: all the same
    teacher_forcing: bool = True  # feed the targets' own prefixes; else run freely
    # What a free run of some rows reads next, from logits and step; None: their greedy tokens
    next_embeds: Callable[[slice, Tensor, int], Tensor] | None = None
    # A penalty on the prompts, whose tokens are then products with its matrix
    fluency: Fluency | None = None
    # All ids of each given row, whose keys and values are to be kept; () where none are
    kept_ids: Sequence[Ids] = ()

    def send(self, parcel: Parcel, wants_gradient: bool) -> None:
        """Let a parcel take to the device what it needs there."""
        self.batch.send(parcel)
        if self.is_packed:
            self.batch.lay_out_packed(self.store.lm, wants_gradient, parcel)

    def losses(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of rows, (R,), and what was decoded, (m,), from tokens of prompts, (C * N, d)."""
        inputs = self.batch.gather(self.store.lm, prompts)
        return _RowLosses.apply(inputs, self)  # type: ignore[no-untyped-call,no-any-return]

    @property
    def is_packed(self) -> bool:
        """Whether rows of any lengths run together."""
        is_uneven = len(self.batch.groups) > 1 or len(self.kept_ids) > 0
        return is_uneven and self.teacher_forcing and self.store.lm.can_pack

    def score(self, inputs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Losses, (r,), and what was decoded, (..,), of some rows' tokens, (.., d)."""
        lm, fluency = self.store.lm, self.fluency
        embeds = readouts = inputs
        watch: AbstractContextManager[list[Tensor]] = nullcontext([])
        if fluency is not None:
            (embeds, readouts), watch = fluency.split(inputs), reading_states(lm)
        with watch as seen:
            logits = self._logits(embeds.to(lm.dtype), rows)
        targets, places = self.batch.targets(rows), self.batch.on_device
        per_token = token_losses(self.loss, logits, places.target_ids[targets])
        weights = torch.ones_like(per_token)
        if self.weights is not None:
            weights = self.weights()[0][targets].to(per_token)
        index = places.row_of_target[targets] - rows.start
        losses = row_losses(self.loss, per_token, weights, index, rows.stop - rows.start)
        if fluency is not None:
            states = torch.cat(seen, dim=1).flatten(0, 1)
            first, size = self.batch.starts[rows.start], self.batch.rows[rows.start].size
            offsets = torch.arange(-size - first, -first, device=inputs.device)
            whole = places.prompt_ends[rows, None] + offsets  # where the prompts lie, (r, N)
            before = whole[:, :-1].to(states.device)
            losses = losses + fluency.penalty(states[before], readouts[whole])
        return losses, logits.detach().argmax(-1)

    def _logits(self, inputs: Tensor, rows: slice) -> Tensor:
        """Logits that predict the target tokens of some rows, one row's after the other's."""
        lm, batch = self.store.lm, self.batch
        if self.is_packed:
            captures = len(self.kept_ids) > 0
            prefixes = batch.prefixes(rows, self.store)
            logits, layers = lm.packed_logits(inputs, batch.layout(rows), prefixes, captures)
            for row, own in enumerate(layers, start=rows.start):
                ids = self.kept_ids[batch.order[row]]
                self.store.keep_rest(ids, batch.rows[row].start, own)
            return logits
        first = batch.rows[rows.start]
        embeds = inputs.view(-1, first.length, inputs.shape[-1])
        prefix = batch.prefix(rows, self.store)
        if self.teacher_forcing:
            return lm.last_logits(embeds, first.keep, prefix).flatten(0, 1)
        prompts = embeds[:, : first.length - first.keep + 1]
        choose = self.next_embeds and functools.partial(self.next_embeds, rows)
        return lm.free_run(prompts, first.keep, choose, prefix).flatten(0, 1)


class _RowLosses(torch.autograd.Function):
    """Losses of rows; the forward pass already holds their gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
        lm, batch = reading.store.lm, reading.batch
        wants_gradient: bool = ctx.needs_input_grad[0]
        losses = inputs.new_empty(len(batch.rows))
        output_ids = torch.empty_like(batch.on_device.target_ids)
        gradients = torch.empty_like(inputs) if wants_gradient else None
        scale = _HALF_SCALE if torch.float16 in (lm.dtype, lm.precision.dtype) else 1.0

        def work(rows: slice) -> None:
            try:
                read(rows)
            except Exception as error:
                if not lm.gives_up_compiling(error):
                    raise
                read(rows)

        def read(rows: slice) -> None:
            tokens = batch.tokens(rows)
            with torch.set_grad_enabled(wants_gradient):
                part = inputs[tokens].detach().requires_grad_(wants_gradient)
                row_losses, said = reading.score(part, rows)
                if gradients is not None:
                    [found] = torch.autograd.grad(row_losses.sum() * scale, part)
                    gradients[tokens] = found / scale
            losses[rows], output_ids[batch.targets(rows)] = row_losses.detach(), said

        batch.run(lm, work, wants_gradient, reading.is_packed)
        ctx.gradients, ctx.batch = gradients, batch
        ctx.mark_non_differentiable(output_ids)
        return losses, output_ids

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients * by_loss[ctx.batch.on_device.row_of_token, None], None
