r"""ARCA: coordinate ascent on a linear model of the loss that is averaged over random tokens.

.. math::
    g_i = \frac{1}{b} \sum_{j=1}^b \nabla_{e_{x_i}} d(f(x_{i \to v_j}), y), \quad v_j \sim U, \quad
    x_i \leftarrow \arg\min_{v \in top_b( -\langle e_v, g_i \rangle )} d(f(x_{i \to v}), y)

Jones et al. 2023, "Automatically Auditing Large Language Models via Discrete Optimization", for a
fixed output. A step is one position i, and steps sweep over the prompt. The gradient at one token
says little about tokens far away, so it is averaged over b random ones. The best of the b tokens
that it proposes is taken even if it is worse than what was there; the best prompt is remembered.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from dlmi.methods.base import Search, Step
from dlmi.methods.candidates import PromptState, swapped_at
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import Pass, Steps, Swaps


@dataclass
class ARCAState(PromptState):
    """What is kept between steps."""

    best_ids: Tensor  # the prompt of lowest loss so far, (N,)
    best_loss: float = float("inf")  # its loss


@dataclass(frozen=True)
class ARCA(Search[ARCAState]):
    """Autoregressive randomised coordinate ascent.

    Args:
        num_candidates: Random tokens that the gradient is averaged over, and tokens that are tried
            at a position, b.
        loss: `cross_entropy`, `margin` (0 at the argmax), `hinge` or `mellowmax` (soft maximum).
    """

    num_candidates: int = 32
    loss: LossName = "cross_entropy"

    state_type = ARCAState

    def begin(self, slot: Slot, prompt_ids: Tensor) -> ARCAState:
        """At x, the best so far."""
        return ARCAState(prompt_ids, prompt_ids)

    def step(self, slot: Slot, state: ARCAState) -> Steps[tuple[Step, ARCAState]]:
        """Choose the token at the next position."""
        x, i = state.prompt_ids, slot.step % slot.length
        examples, first = slot.examples, 0
        if slot.can_narrow and i > 0:  # tokens before the position are read once
            first, fixed = i, x.tolist()
            examples = tuple(replace(e, context=e.context.narrowed(fixed, i)) for e in examples)
        random_ids = slot.tokens.random_ids(1, self.num_candidates, slot.rng)[0]
        swaps = Swaps(slot.tokens, self.num_candidates)
        ids = swapped_at(x, i, random_ids)
        averaged = yield Pass(ids[:, first:], examples, self.loss, swaps=swaps)
        assert averaged.swap_ids is not None  # (N - first, b)
        ids = slot.surviving(swapped_at(x, i, averaged.swap_ids[i - first]))
        if len(ids) == 0:
            return Step(averaged.losses.mean(), averaged.output_ids[0]), state
        scores = yield Pass(ids[:, first:], examples, self.loss)
        best = int(scores.losses.argmin())
        x = ids[best]
        if slot.must_confirm:
            best = 0
            scores = yield Pass(x[None, first:], examples, self.loss, is_measured=True)
        loss, output_ids = scores.losses[best], scores.output_ids[best]
        found_ids = x if slot.is_wanted(output_ids) else None
        if found_ids is not None or slot.is_better(float(loss), state.best_loss):
            state = ARCAState(x, x, float(loss))
        step = Step(loss, output_ids, found_ids=found_ids)
        return step, ARCAState(x, state.best_ids, state.best_loss)

    def prompt_ids(self, slot: Slot, state: ARCAState) -> Tensor:
        """The best prompt so far."""
        return state.best_ids
