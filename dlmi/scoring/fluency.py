r"""Fluency: a penalty on prompts that the LM finds unlikely, as a term of the loss.

.. math::
    F = \frac{1}{N-1} \sum_{i=2}^{N} - \sum_v \pi_i(v) \log q(v | \pi_1 .. \pi_{i-1})

For a discrete prompt it is the logarithm of its perplexity; for relaxed rows :math:`\pi` it is the
cross-entropy of each row under the LM that has read the rows before it, as in GBDA (Guo et al.
2021). Gradients go through the rows and through what the LM read.

No distribution is held for it. Where the LM's logits are :math:`W h + b`,

.. math::
    - \sum_v \pi_i(v) \log q(v) = \log \sum_v e^{w_v h + b_v} - (\pi_i W) h - \pi_i b,

so that all that is needed of a row is its readout :math:`\pi_i [W, b]`. It is made with the row's
embedding, in one product with [E, W, b]; where E is W (tied weights) it *is* the embedding. The
gradient of the first term is the head row that the LM expects, :math:`\sum_v q(v) w_v`, which is
made with it, a few positions at a time.

Axes: R rows of a pass, N prompt tokens, L positions that the LM reads, V tokens a prompt may hold,
U rows of the head, d width of an embedding, h width of a hidden state.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.tokens.vocabulary import Vocabulary

_HELD_ENTRIES = 2**22  # of logits that are held at once: 16 MiB in float32


class Fluency:
    """The penalty, for the tokens of a vocabulary, times a weight.

    Attributes:
        matrix: What each token embeds to and is read out by: [E, W, b], or E where W is E.
    """

    def __init__(self, vocabulary: Vocabulary, weight: float) -> None:
        self.vocabulary = vocabulary
        self.weight = weight
        self._lm = vocabulary.lm
        self._head, self._bias = read_head(self._lm)  # (U, h), (U,)
        embeddings = vocabulary.matrix
        ids = vocabulary.token_ids.to(self._head.device)
        readouts = self._head[ids]
        if self._bias is not None:
            readouts = torch.cat([readouts, self._bias[ids, None]], dim=1)
        readouts = readouts.to(embeddings)
        self._is_tied = torch.equal(readouts, embeddings)
        self._width = embeddings.shape[1]
        self.matrix = embeddings if self._is_tied else torch.cat([embeddings, readouts], dim=1)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Products with `matrix` to embeddings, (..., d), and readouts, (..., h), or h + 1."""
        if self._is_tied:
            return rows, rows
        return rows[..., : self._width], rows[..., self._width :]

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of `matrix` that stand for tokens, of any shape."""
        return F.embedding(self.vocabulary.columns(ids), self.matrix)

    def penalty(self, states: Tensor, readouts: Tensor) -> Tensor:
        """What is added to the losses of rows, (R,), in float32 or better.

        Args:
            states: The LM's hidden states before the second to last prompt token, (R, N - 1, h).
            readouts: Of all prompt tokens, (R, N, h) or (R, N, h + 1).
        """
        states = states.to(self._head.device)
        totals: Tensor = _LogSumExp.apply(states.flatten(0, 1), self._head, self._bias)  # type: ignore[no-untyped-call]
        readouts = readouts[:, 1:].to(totals.dtype)
        totals, states = totals.view(states.shape[:2]).to(readouts), states.to(readouts)
        width = states.shape[-1]
        chosen = (readouts[..., :width] * states).sum(-1) + readouts[..., width:].sum(-1)
        return self.weight * (totals - chosen).mean(-1)


class _LogSumExp(torch.autograd.Function):
    """Of the head's logits, (P, h) to (P,); the forward pass already holds the gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
        states = states.to(head.dtype)
        wants_gradient: bool = ctx.needs_input_grad[0]
        expected = torch.empty_like(states) if wants_gradient else None
        totals = states.new_empty(len(states), dtype=torch.promote_types(head.dtype, torch.float32))
        width = max(1, _HELD_ENTRIES // len(head))
        for start in range(0, len(states), width):
            part = slice(start, start + width)
            logits = F.linear(states[part], head, bias).to(totals.dtype)
            totals[part] = torch.logsumexp(logits, dim=-1)
            if expected is not None:
                expected[part] = torch.softmax(logits, dim=-1).to(head.dtype) @ head
        ctx.expected = expected
        return totals

    @staticmethod
    def backward(ctx: Any, by_total: Tensor) -> tuple[Tensor, None, None]:
        return ctx.expected * by_total[:, None].to(ctx.expected.dtype), None, None


@contextlib.contextmanager
def reading_states(lm: FrozenLM) -> Iterator[list[Tensor]]:
    """Collect the LM's last hidden states, (R, L, h), of each pass made inside this context."""
    seen: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        seen.append(output.last_hidden_state)

    with lm.model.base_model.register_forward_hook(keep), lm.not_compiled():
        yield seen


@torch.no_grad()
def read_head(lm: FrozenLM) -> tuple[Tensor, Tensor | None]:
    """What an LM's last hidden states are multiplied by, (U, h), and what is added, (U,).

    `InputError` if its logits are not that.
    """
    head = lm.model.get_output_embeddings()
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    # Without a base model there are no hidden states to hook; 8 and 4 bits are no plain product.
    if lm.model.base_model is not lm.model and weight is not None and weight.is_floating_point():
        ids = lm.prompt_token_ids[torch.linspace(0, len(lm.prompt_token_ids) - 1, 4).long()]
        with reading_states(lm) as seen:
            logits = lm.last_logits(lm.embed(ids[None].to(lm.device)), keep=len(ids))
        by_hand = F.linear(seen[0].to(weight), weight, bias).to(logits)
        if (by_hand - logits).abs().max() <= 0.02 * logits.abs().max():
            return weight.detach(), None if bias is None else bias.detach()
    raise InputError(
        f"Expected `model.fluency` to be 0 with {lm.name} ({type(lm.model).__name__}), whose "
        "logits are not its last hidden states times a matrix. Leave it out."
    )
