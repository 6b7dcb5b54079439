r"""ADC: adaptive dense-to-sparse optimisation on the simplex.

.. math::
    h_i = z_i E, \quad z_i \in \Delta^V, \quad
    z \leftarrow sparsify_{s}( z - \eta \, m ), \quad s = 2^{w}, \quad
    w \leftarrow 0.99 w + 0.01 \, \#wrong(z)

Hu et al. 2024 (arXiv 2405.09113). After each step of SGD with heavy momentum m, only the s largest
entries of each row are kept, and s shrinks as fewer teacher-forced target tokens are wrong: the
prompt hardens because it works, not on a schedule. Several restarts share one batch; their losses
are summed. In every step the argmax prompt of each is scored. If it was scored before, a prompt
with the second best token at one position takes its place.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dlmi.estimators.noise import gumbel_noise
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.lm.norm_gradients import NormGradientScale
from dlmi.methods.base import Relaxation, Step, simplex_prompt
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import NO_SWAP, Pass, Steps
from dlmi.tokens.vocabulary import Vocabulary

_MINIMUM_LARGER_ROWS = 5  # rows that keep one entry more than the whole part of s


def keep_largest(rows: Tensor, count: int, is_larger: Tensor) -> Tensor:
    """Keep the largest entries of rows, (N, V), made positive, and let them sum to one.

    Each row keeps `count`, those of `is_larger`, (N,), one more; -inf bars an entry.
    """
    values, columns = rows.topk(count + 1, dim=-1, sorted=False)  # to sort many takes long
    kept = (values.relu() + 1e-6).masked_fill_(values.isneginf(), 0)
    lowest = values.argmin(-1, keepdim=True)
    kept.scatter_(-1, lowest, kept.gather(-1, lowest) * is_larger[:, None])
    return torch.zeros_like(rows).scatter_(-1, columns, kept / kept.sum(-1, keepdim=True))


def count_larger_rows(sparsity: float, length: int) -> int:
    """Of N rows, those that keep one entry more than the whole part of s, for a mean of about s."""
    return max(int(sparsity % 1 * length), _MINIMUM_LARGER_ROWS)


@dataclass
class ADCState:
    """What is kept between steps."""

    best_ids: Tensor  # the discrete prompt of lowest loss that any restart has had, (N,)
    best_loss: float = float("inf")  # its loss
    wrong: Tensor | None = None  # moving average of the wrong target tokens of each restart, (R,)
    seen: set[int] = field(default_factory=set)  # hashes of the prompts that were scored


@dataclass(frozen=True)
class ADC(Relaxation[ADCState]):
    """Adaptive dense-to-sparse search on the simplex, with restarts in one batch.

    Args:
        restarts: Starts optimised side by side for each target.
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
        lr: SGD's learning rate.
        momentum: SGD's momentum.
        ema_rate: Weight of the newest count of wrong tokens in the sparsity.
        norm_gradient_scale: Factor on gradients at the LM's norm layers; 1 leaves them alone,
            `auto` tries a few, once for each LM.
    """

    restarts: int = 16
    loss: LossName = "cross_entropy"
    lr: float = 10.0
    momentum: float = 0.99
    ema_rate: float = 0.01
    norm_gradient_scale: NormGradientScale = 1.0

    state_type = ADCState
    reads_embeddings = True
    ranges: ClassVar = {"momentum": "[0, 1)", "ema_rate": "(0, 1]"}

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Z (R, N, V): a row of the simplex per restart and position."""
        return {"Z": (self.restarts, length, len(vocabulary))}

    def init(self, slot: Slot) -> ADCState:
        """The softmax of N(0, 1); the first restart's argmax is the best prompt so far."""
        rows = slot.tokens.bar_(slot.draw_normal_("Z"))
        rows.copy_(torch.softmax(rows, dim=-1))
        return ADCState(slot.tokens.argmax_ids(rows[0]))

    def step(self, slot: Slot, state: ADCState) -> Steps[tuple[Step, ADCState]]:
        """The losses of all restarts, summed; reports the lowest."""
        rows = slot.params["Z"]  # (R, N, V)
        two_best, preferences = self._two_best(slot)
        if state.wrong is not None:
            self._sparsify(slot, state.wrong)
        embeds = rows @ slot.tokens.vocabulary.matrix.to(rows.dtype)  # (R, N, d)
        relaxed = yield Pass(
            embeds,
            slot.examples,
            self.loss,
            norm_gradient_scale=self.norm_gradient_scale,
            is_seen=True,
            beside=two_best,
        )
        assert relaxed.beside is not None
        prompt_ids, seen = self._unseen(slot, state.seen, preferences, relaxed.beside)
        best_ids, best_loss, found_ids = state.best_ids, state.best_loss, None
        if prompt_ids:
            discrete = yield Pass(torch.stack(prompt_ids), slot.examples)
            exact = [slot.is_wanted(output_ids) for output_ids in discrete.output_ids]
            best = exact.index(True) if any(exact) else int(discrete.losses.argmin())
            found_ids = prompt_ids[best] if exact[best] else None
            if exact[best] or slot.is_better(float(discrete.losses[best]), best_loss):
                best_ids, best_loss = prompt_ids[best], float(discrete.losses[best])
        is_wrong = relaxed.output_ids != relaxed.output_ids.new_tensor(slot.wanted_ids)
        wrong = (is_wrong.sum(-1) / len(slot.examples)).to(rows.dtype)  # (R,)
        average = wrong if state.wrong is None else state.wrong
        average = average + self.ema_rate * (wrong - average)
        losses = relaxed.seen_losses
        output_ids = relaxed.output_ids[losses.argmin()]
        step = Step(relaxed.losses.sum(), output_ids, losses.amin(), found_ids)
        return step, ADCState(best_ids, best_loss, average, seen)

    def _two_best(self, slot: Slot) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The two best tokens of each row, (R, N, 2), and the rows, (N, V), if repairs need them.

        Else no copy of the rows is kept during the pass.
        """
        restarts = slot.tokens.bar_(slot.params["Z"].detach().clone())  # (R, N, V)
        values, columns = restarts.topk(min(2, restarts.shape[-1]), dim=-1)
        ids = slot.tokens.ids(columns).masked_fill(values.isneginf(), NO_SWAP)
        return ids, list(restarts) if slot.tokens.must_round_trip else [None] * len(restarts)

    def _unseen(
        self, slot: Slot, seen: set[int], preferences: Sequence[Tensor | None], two_best: Tensor
    ) -> tuple[list[Tensor], set[int]]:
        """The prompts to be scored, (N,), at most one of each restart, and all that were seen."""
        seen, found = set(seen), []
        for rows, ids in zip(preferences, two_best, strict=True):
            best, second = slot.tokens.repaired(ids[None, :, 0], rows), ids[:, -1]
            choices = best
            # Examples that change from step to step are scored anew.
            if _hash(best[0]) in seen and not slot.target.is_shared:
                choices = torch.where(torch.eye(slot.length, dtype=torch.bool), second, best[0])
                choices = slot.surviving(choices[second != NO_SWAP])
                choices = choices[[_hash(choice) not in seen for choice in choices]]
            if len(choices):
                seen.add(_hash(choices[0]))
                found.append(choices[0])
        return found, seen

    @torch.no_grad()
    def _sparsify(self, slot: Slot, wrong: Tensor) -> None:
        restarts = slot.tokens.bar_(slot.params["Z"])  # a step has moved them off 0
        draws = gumbel_noise(slot.seed("larger"), (1, 1, slot.length), restarts.device, wrong.dtype)
        order = draws.flatten().argsort().argsort()
        sparsity = (2.0**wrong).clamp_max(restarts.shape[-1] / 2).clamp_min(1)
        for rows, own in zip(restarts, sparsity.tolist(), strict=True):  # together: more memory
            is_larger = order < count_larger_rows(own, slot.length)
            rows.copy_(keep_largest(rows, int(own), is_larger))

    def prompt_ids(self, slot: Slot, state: ADCState) -> Tensor:
        """The best discrete prompt so far."""
        return state.best_ids

    def soft_prompt(self, slot: Slot, state: ADCState) -> SoftPrompt:
        """The rows of the restart with the fewest wrong tokens."""
        restart = 0 if state.wrong is None else int(state.wrong.argmin())
        return simplex_prompt(slot, slot.params["Z"][restart])

    def diagnostics(self, slot: Slot, state: ADCState) -> dict[str, Tensor]:
        """How many entries of each position's row are not zero, averaged over restarts."""
        return {"nonzero": (slot.params["Z"] > 0).sum(-1).float().mean(0)}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """SGD with heavy momentum."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum)


def _hash(ids: Tensor) -> int:
    """The same in every process: that of a tuple of integers."""
    return hash(tuple(ids.tolist()))
