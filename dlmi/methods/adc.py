r"""ADC: adaptive dense-to-sparse optimisation on the simplex.

.. math::
    h_i = z_i E, \quad z_i \in \Delta^V, \quad
    z \leftarrow sparsify_{s}( z - \eta \, m ), \quad s = 2^{w}, \quad
    w \leftarrow 0.99 w + 0.01 \, \#wrong(z)

Hu et al. 2024 (arXiv 2405.09113). The rows lie on the simplex themselves: no softmax, no noise, no
temperature. After each step of SGD with heavy momentum only the s largest entries of each row are
kept, and s shrinks as the teacher-forced target tokens come right, so that the prompt hardens
because it works, not on a schedule. Several restarts share one batch, and the argmax prompt of
each is scored at every step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.inverter import Inverter
from dlmi.losses import LossName
from dlmi.passes import StepLosses, target_pass
from dlmi.prompt_forms import Relaxation
from dlmi.slots import Slot
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens

_MINIMUM_LARGER_ROWS = 5  # rows that get one entry more when s is not whole


def keep_largest(rows: Tensor, counts: Tensor) -> Tensor:
    """Keep the largest entries of each row, made positive, and let them sum to one.

    Args:
        rows: (..., V); -inf bars an entry.
        counts: How many entries each row keeps, (...).
    """
    if int(counts.min()) >= rows.shape[-1]:
        positive = _made_positive(rows)
        return positive / positive.sum(-1, keepdim=True)
    most = min(int(counts.max()), rows.shape[-1])
    values, columns = rows.topk(most, dim=-1)
    kept = _made_positive(values) * (torch.arange(most, device=rows.device) < counts[..., None])
    return torch.zeros_like(rows).scatter_(-1, columns, kept / kept.sum(-1, keepdim=True))


def _made_positive(entries: Tensor) -> Tensor:
    return (entries.relu() + 1e-6).masked_fill_(entries.isneginf(), 0)


def sparsity_counts(sparsity: float, length: int, generator: torch.Generator) -> Tensor:
    """Entries that each of N rows keeps so that they are s on average, (N,).

    With a fractional s, random rows get one entry more than the others: that share of them, and
    at least five, so that the last ones to harden do not harden all at once.
    """
    floor = int(sparsity)
    share = sparsity - floor
    larger = 0
    if share > 0:
        larger = min(length, max(round(share * length), _MINIMUM_LARGER_ROWS))
    counts = torch.full((length,), floor, device=generator.device)
    chosen = torch.randperm(length, generator=generator, device=generator.device)[:larger]
    counts[chosen] += 1
    return counts.clamp_min(1)


class ADC(Inverter):
    """Adaptive dense-to-sparse search on the simplex, with restarts in one batch.

    Args:
        prompt_length: Tokens of a prompt, N.
        steps: Budget: optimisation steps a target may use.
        token_budget: Budget in token passes through the LM, beside `steps`.
        restarts: Starts optimised side by side for each target.
        loss: `cross_entropy`, `margin` (0 where the target is the argmax) or `hinge`.
        lr: SGD's learning rate.
        momentum: SGD's momentum.
        ema_rate: Weight of the newest count of wrong tokens in the sparsity.
        norm_gradient_scale: Factor on gradients at the norm layers; 1 leaves them alone.
        eval_every: Steps between two greedy decodes of the best discrete prompt.
        prompt_bos: Put BoS before the prompt, in optimisation and in evaluation.
        allowed_tokens: What a prompt may hold: `all` tokens, `no_special` ones, those whose text is
            `ascii` or `printable`, those that `round_trip`, or a file with a token a line.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        refine_after: Share of the budget after which the best discrete prompt is refined by
            swaps (`dlmi.refinement`); 1 for never.
        refine_width: Swaps that a step of the refinement tries.
        seed: With the target's id it fixes the starts. On the command line: `seed_everything`.
    """

    def __init__(
        self,
        prompt_length: int = 80,
        steps: int = 2048,
        token_budget: int | None = None,
        restarts: int = 16,
        loss: LossName = "cross_entropy",
        lr: float = 10.0,
        momentum: float = 0.99,
        ema_rate: float = 0.01,
        norm_gradient_scale: float = 1.0,
        eval_every: int = 16,
        prompt_bos: bool = False,
        allowed_tokens: AllowedTokens = "all",
        forbid_target_tokens: ForbiddenTokens = "none",
        refine_after: float = 1.0,
        refine_width: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(
            prompt_length,
            steps,
            token_budget,
            eval_every,
            prompt_bos,
            allowed_tokens,
            forbid_target_tokens,
            seed,
        )
        self.set_norm_gradient_scale(norm_gradient_scale)
        self.set_refinement(refine_after, refine_width)
        check_at_least_one("model", restarts=restarts)
        check_positive("model", lr=lr)
        if not (0 <= momentum < 1 and 0 < ema_rate <= 1):
            raise InputError(
                "Expected `model.momentum` to be at least 0 and below 1 and `model.ema_rate` to be "
                f"above 0 and at most 1, but got {momentum} and {ema_rate}."
            )
        self.restarts = restarts
        self.loss: LossName = loss
        self.lr = lr
        self.momentum = momentum
        self.ema_rate = ema_rate

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Z (R, N, V): a row of the simplex per restart and position."""
        return {"Z": (self.restarts, self.prompt_length, len(self.vocabulary))}

    def initialise(self, slot: Slot) -> None:
        """The softmax of N(0, 1)."""
        parameter = self.Z[slot.index]
        self.vocabulary.bar_(parameter.normal_(generator=slot.generator), slot.target)
        parameter.copy_(torch.softmax(parameter, dim=-1))

    def losses(self, slots: Sequence[Slot]) -> StepLosses:
        """The sum over restarts, each on its own; reports the lowest of them."""
        for slot in slots:
            if slot.step:
                self._sparsify(slot)
        rows = [self.Z[slot.index] for slot in slots]  # (R, N, V) each
        self._score_discrete(slots, torch.stack([r.detach().argmax(-1) for r in rows]))
        matrix = self.vocabulary.matrix.to(self.compute_dtype)
        embeds = torch.stack([r @ matrix for r in rows])  # (B, R, N, d)
        losses, output_ids = target_pass(
            self.lm, slots, embeds, self.loss, prompt_bos=self.prompt_bos
        )
        for slot, outputs in zip(slots, output_ids, strict=True):
            self._count_wrong(slot, outputs)
        lowest = losses.detach().argmin(dim=1)  # (B,)
        return StepLosses(
            losses.sum(dim=1),
            output_ids[torch.arange(len(slots)), lowest],
            losses.detach().amin(dim=1),
        )

    def _count_wrong(self, slot: Slot, outputs: Tensor) -> None:
        """Follow how many target tokens (of an example) are wrong after each restart, (R,)."""
        target = slot.target_at()
        target_ids = torch.tensor(target.ids, device=outputs.device)
        wrong = (outputs[:, : len(target_ids)] != target_ids).sum(-1).to(self.compute_dtype)
        wrong = wrong / len(target.readings)
        average = slot.memory.get("wrong", wrong)
        slot.memory["wrong"] = average + self.ema_rate * (wrong - average)

    @torch.no_grad()
    def _sparsify(self, slot: Slot) -> None:
        self.vocabulary.bar_(self.Z[slot.index], slot.target)  # a step has moved them off 0
        for rows, wrong in zip(self.Z[slot.index], slot.memory["wrong"].tolist(), strict=True):
            # Beyond the vocabulary nothing is cut; a bounded exponent keeps the power finite.
            sparsity = min(2.0 ** min(wrong, 64.0), rows.shape[-1])
            counts = sparsity_counts(sparsity, self.prompt_length, slot.generator)
            rows.copy_(keep_largest(rows, counts))

    @torch.no_grad()
    def _score_discrete(self, slots: Sequence[Slot], columns: Tensor) -> None:
        """Keep the argmax prompt with the lowest loss that any restart has had: (B, R, N)."""
        rows = zip(slots, self.vocabulary.ids(columns), strict=True)
        token_ids = torch.stack([self.mended(slot, ids) for slot, ids in rows])
        losses, output_ids = target_pass(
            self.lm, slots, self.lm.embed(token_ids), "cross_entropy", prompt_bos=self.prompt_bos
        )
        for row, slot in enumerate(slots):
            target_ids = torch.tensor(slot.target_at().ids, device=columns.device)
            exact = (output_ids[row, :, : len(target_ids)] == target_ids).all(-1)
            best = int(exact.int().argmax() if exact.any() else losses[row].argmin())
            loss = float(losses[row, best])
            slot.is_promising = bool(exact[best])
            # Losses on different examples cannot be compared: then the latest best is the best.
            is_shared = slot.target.shared is not None
            before = slot.memory.get("best_loss", float("inf"))
            if slot.is_promising or is_shared or loss < before:
                slot.memory["best_loss"] = loss
                slot.memory["best_ids"] = token_ids[row, best]

    def token_passes_per_step(self, target_length: int) -> int:
        """Each restart's rows forward and backward, its discrete prompt forward."""
        return 3 * self.restarts * (self.prompt_length + target_length - 1)

    def prompt_ids(self, slots: Sequence[Slot]) -> Tensor:
        """The best discrete prompts so far; before the first step, the first restart's, (B, N)."""
        rows = []
        for slot in slots:
            if "best_ids" not in slot.memory:
                first = self.vocabulary.ids(self.Z[slot.index][:1].detach().argmax(-1))
                rows.append(self.mended(slot, first)[0])
            else:
                rows.append(slot.memory["best_ids"])
        return torch.stack(rows)

    @torch.no_grad()
    def diagnostics(self, slot: Slot) -> dict[str, Tensor]:
        """How many entries of each position's row are not zero, averaged over restarts."""
        return {"nonzero": (self.Z[slot.index] > 0).sum(-1).float().mean(0)}

    @torch.no_grad()
    def relaxation(self, slot: Slot) -> Relaxation:
        """The rows of the restart with the fewest wrong tokens."""
        wrong: Tensor | None = slot.memory.get("wrong")
        rows = self.Z[slot.index][0 if wrong is None else int(wrong.argmin())]  # (N, V)
        logits = rows.clamp_min(torch.finfo(rows.dtype).tiny).log()
        self.vocabulary.bar_(logits, slot.target)
        return Relaxation(logits, rows.new_ones(self.prompt_length))

    def configure_optimizers(self) -> Optimizer:
        """SGD with heavy momentum."""
        return SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
