r"""PGD: projected gradient descent on the simplex, with an entropy projection that hardens rows.

.. math::
    h_i = \frac{z_i}{|z_i|_1} E, \quad z_i \in \Delta^V, \quad
    z \leftarrow \Pi_{entropy}( \Pi_{\Delta}( z - \eta \, Adam(clip(\nabla_z d(f(h), y))) ) )

Geisler et al. 2024, "Attacking Large Language Models with Projected Gradient Descent", as in the
public code. Each row moves by Adam and is then projected onto the simplex. Where its Gini index is
too large, it is pushed away from the centre of the simplex: its squared distance from there is at
least a share of that of a vertex. That share grows from 0 to `entropy_factor` in the first steps.
It is also proportional to the learning rate, and nearly 0 where the relaxed loss is within a tenth
of the discrete one. In every step the argmax prompt is scored; when it has not improved for
`patience` steps, the rows become the one-hot rows of the best prompt, and Adam keeps its moments.

The learning rate is constant at first. Then it rises along half a cosine, again and again. All
slots share an optimiser but each has its own step count, so a slot scales the optimiser's step.

The public code also attacks many prompts at once and may go back to another prompt's best, weighs
the first target tokens more, and adds small losses for a likely prompt. These are left out.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.methods.base import Defaults, Relaxation, Step, simplex_prompt
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps

_CONSTANT_STEPS = 100  # before the learning rate begins to rise
_COSINE_STEPS = 60  # until it starts again
_PEAK_RATE = 0.325  # the learning rate that it rises to
_SMALL_GAP = 0.1  # between relaxed and discrete loss: below it, rows are hardened less


def onto_simplex(rows: Tensor) -> Tensor:
    """Rows, (..., V), put onto the simplex; entries of -inf become 0.

    That is the nearest point, but where positive entries sum to less than one they are scaled up.
    Without any the row becomes uniform.

    >>> onto_simplex(torch.tensor([[0.5, 1.0, -1.0], [0.1, 0.3, -1.0]]))
    tensor([[0.2500, 0.7500, 0.0000],
            [0.2500, 0.7500, 0.0000]])
    """
    positive = rows.clamp(0, 1)
    total = positive.sum(-1, keepdim=True)
    positive = torch.where(total > 0, positive, (rows > -torch.inf).to(rows.dtype))
    descending = rows.sort(dim=-1, descending=True).values
    ranks = torch.arange(1, rows.shape[-1] + 1, device=rows.device)
    offsets = (descending.cumsum(-1) - 1) / ranks
    count = (descending > offsets).sum(-1, keepdim=True)  # of positive entries
    nearest = (rows - offsets.gather(-1, count - 1)).relu()
    return torch.where(total > 1, nearest, positive / positive.sum(-1, keepdim=True))


def harden(rows: Tensor, share: float) -> Tensor:
    """Push rows of the simplex, (..., V), away from the centre of their non-zero entries.

    The squared distance from there is at least this share of that of a vertex: 0 changes nothing,
    1 leaves vertices.

    >>> harden(torch.tensor([0.5, 0.3, 0.2]), 0.4)
    tensor([0.7317, 0.2537, 0.0146])
    """
    is_used = rows > 0
    count = is_used.sum(-1, keepdim=True).to(rows.dtype)
    away = torch.where(is_used, rows - 1 / count, 0)
    distance = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
    radius = (share * (1 - 1 / count)).sqrt()
    pushed = rows + away * (radius / distance.clamp_min(1e-12) - 1)
    pushed = torch.where(is_used, pushed, -torch.inf)
    return torch.where(distance < radius, onto_simplex(pushed), rows)


def weakened(gap: float) -> float:
    """How much of the hardening is left at a relative gap between relaxed and discrete loss.

    >>> [round(weakened(gap), 4) for gap in (0.0, 0.05, 0.0999, 0.1)]
    [0.0, 0.0034, 0.0154, 1.0]
    """
    if gap >= _SMALL_GAP:
        return 1.0
    x = max(gap, 0.0) / (1 - _SMALL_GAP)
    return x**2 / (x**2 + (1 - x) ** 2)


@dataclass
class PGDState:
    """What is kept between steps."""

    best_ids: Tensor  # the discrete prompt of lowest loss, (N,)
    best_loss: float = float("inf")  # its loss
    waited: int = 0  # steps since it was found
    gap: float = 1.0  # of the latest step: 1 - relaxed loss / discrete loss
    before: Tensor | None = None  # the rows before the optimiser's step, (N, V)


@dataclass(frozen=True)
class PGD(Relaxation[PGDState]):
    """Projected gradient descent on the simplex.

    Args:
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
        lr: Adam's learning rate in the first 100 steps; later it rises to 0.325 every 60 steps.
        clip: Largest norm of the gradient of a position.
        entropy_factor: How hard rows can get: 0 leaves them alone, 1 makes them one-hot.
        entropy_steps: Steps until then.
        patience: Steps without a better discrete prompt before the rows go back to the best one.
    """

    loss: LossName = "cross_entropy"
    lr: float = 0.11
    clip: float = 20.0
    entropy_factor: float = 0.4
    entropy_steps: int = 250
    patience: int = 100

    state_type = PGDState
    reads_embeddings = True
    published = Defaults(steps=5000, token_sets=("no_special", "ascii", "printable"))
    ranges: ClassVar = {"entropy_factor": "[0, 1]"}

    def init(self, slot: Slot) -> PGDState:
        """Rows from U(0, 1), made to sum to one."""
        rows = slot.params["Z"]
        rows.copy_(torch.empty(rows.shape, dtype=rows.dtype).uniform_(generator=slot.rng))
        rows[:, slot.tokens.barred_columns.to(rows.device)] = 0
        rows.div_(rows.sum(-1, keepdim=True))
        return PGDState(slot.tokens.argmax_ids(rows))

    def step(self, slot: Slot, state: PGDState) -> Steps[tuple[Step, PGDState]]:
        """Project what the optimiser has moved, score the argmax, and descend on the rows."""
        rows = slot.params["Z"]
        self._project(slot, state)
        prompt_ids = slot.tokens.argmax_ids(rows)
        discrete = yield Pass(prompt_ids[None], slot.examples, self.loss)
        found_ids = prompt_ids if slot.is_wanted(discrete.output_ids[0]) else None
        loss = float(discrete.losses[0])
        if found_ids is not None or slot.is_better(loss, state.best_loss):
            state = PGDState(prompt_ids, loss)
        else:
            state = replace(state, waited=state.waited + 1)
        if state.waited >= self.patience:
            columns = slot.tokens.columns(state.best_ids.to(rows.device))
            with torch.no_grad():
                rows.zero_().scatter_(1, columns[:, None], 1)
            state.waited = 0
        state.before = rows.detach().clone()
        clipped = rows.view_as(rows)
        clipped.register_hook(self._clipped)  # type: ignore[no-untyped-call]
        normalised = clipped / clipped.sum(-1, keepdim=True)  # which changes the gradient only
        embeds = normalised @ slot.tokens.vocabulary.matrix.to(rows.dtype)  # (N, d)
        relaxed = yield Pass(embeds[None], slot.examples, self.loss, is_seen=True)
        state.gap = 1 - float(relaxed.seen_losses[0]) / loss if loss > 0 else 1.0
        return Step(relaxed.losses[0], relaxed.output_ids[0], found_ids=found_ids), state

    @torch.no_grad()
    def _project(self, slot: Slot, state: PGDState) -> None:
        """Scale the optimiser's step, then put the rows back onto the simplex."""
        if state.before is None:  # nothing has moved yet
            return
        rows = slot.params["Z"]
        before = state.before.to(rows.device)
        rows.copy_(before + self._rate(slot.step - 1) / self.lr * (rows - before))
        share = self.entropy_factor * min(1.0, (slot.step - 1) / self.entropy_steps)
        share *= weakened(state.gap) * self._rate(slot.step) / max(self.lr, _PEAK_RATE)
        rows.copy_(harden(onto_simplex(slot.tokens.bar_(rows)), share))

    def _rate(self, step: int) -> float:
        """The learning rate of a step."""
        phase = max(step - _CONSTANT_STEPS, 0) % _COSINE_STEPS / _COSINE_STEPS
        return _PEAK_RATE + (self.lr - _PEAK_RATE) * (1 + math.cos(math.pi * phase)) / 2

    def _clipped(self, gradient: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        return gradient * (self.clip / norms.clamp_min(self.clip))

    def prompt_ids(self, slot: Slot, state: PGDState) -> Tensor:
        """The best discrete prompt so far."""
        return state.best_ids

    def soft_prompt(self, slot: Slot, state: PGDState) -> SoftPrompt:
        """The rows as distributions."""
        return simplex_prompt(slot, slot.params["Z"])
