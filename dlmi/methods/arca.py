r"""ARCA: coordinate ascent on a linear model of the loss that is averaged over random tokens.

.. math::
    g_i = \frac{1}{b} \sum_{j=1}^b \nabla_{e_{x_i}} d(f(x_{i \to v_j}), y), \quad v_j \sim U, \quad
    x_i \leftarrow \arg\min_{v \in top_b( -\langle e_v, g_i \rangle )} d(f(x_{i \to v}), y)

Jones et al. 2023, "Automatically Auditing Large Language Models via Discrete Optimization", for a
fixed output. A step is one position, and positions follow each other from the first to the last,
over and over. The gradient at the token that is there now says little about tokens far away, so it
is averaged over b random ones. The best of the b tokens that it promises most of is taken, even if
it is worse than what was there; the best prompt so far is remembered.

Tokens before the position stay as they are, so the LM reads them once.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from dlmi.errors import check_at_least_one
from dlmi.methods.autoprompt import swapped_at
from dlmi.methods.base import Defaults, Search, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import NO_SWAP, Pass, Steps, Swaps
from dlmi.targets.context import Example


@dataclass
class ARCAState:
    """What is kept between steps."""

    prompt_ids: Tensor  # x, (N,)
    best_ids: Tensor  # the prompt of lowest loss so far, (N,)
    best_loss: float = float("inf")  # its loss


@dataclass(frozen=True)
class ARCA(Search[ARCAState]):
    """Autoregressive randomised coordinate ascent.

    Args:
        num_candidates: Random tokens that the gradient is averaged over, and tokens that are tried
            at a position, b.
        loss: `cross_entropy`, `margin`, `hinge` or `mellowmax`.
    """

    num_candidates: int = 32
    loss: LossName = "cross_entropy"

    state_type = ARCAState

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_at_least_one("model.method", num_candidates=self.num_candidates)

    def defaults(self) -> Defaults:
        """A step is one position: 500 are 50 sweeps of a prompt of ten tokens."""
        return Defaults(steps=500, eval_every=None, token_sets=("no_special",))

    def starts(self, slot: Slot) -> Tensor:
        """Random tokens."""
        return slot.tokens.random_ids(1, slot.length, slot.rng)

    def begin(self, slot: Slot, prompt_ids: Tensor) -> ARCAState:
        """From x."""
        return ARCAState(prompt_ids, prompt_ids)

    def step(self, slot: Slot, state: ARCAState) -> Steps[tuple[Step, ARCAState]]:
        """Choose the token at the next position."""
        x, position = state.prompt_ids, slot.step % slot.length
        first = position if slot.can_narrow else 0  # where the LM begins to read
        examples = self._examples(slot, x, first)
        random_ids = slot.tokens.random_ids(1, self.num_candidates, slot.rng)[0]
        asked = Pass(
            swapped_at(x, position, random_ids)[:, first:],
            examples,
            self.loss,
            swaps=Swaps(slot.tokens, self.num_candidates),
        )
        averaged = yield asked
        assert averaged.swap_ids is not None  # (N - first, b)
        tokens = averaged.swap_ids[position - first]
        ids = swapped_at(x, position, tokens[tokens != NO_SWAP])
        if slot.tokens.must_round_trip:
            ids = slot.tokens.surviving(ids)
        if len(ids) == 0:
            return Step(averaged.losses.mean(), averaged.output_ids[0]), state
        tried = yield Pass(ids[:, first:], examples, self.loss)
        best = int(tried.losses.argmin())
        chosen, loss, output_ids = ids[best], tried.losses[best], tried.output_ids[best]
        if slot.must_confirm:
            asked = Pass(chosen[None, first:], examples, self.loss, is_measured=True)
            measured = yield asked
            loss, output_ids = measured.losses[0], measured.output_ids[0]
        found_ids = chosen if slot.is_wanted(output_ids) else None
        best_ids, best_loss = state.best_ids, state.best_loss
        # Losses on different examples cannot be compared: then the latest is the best.
        if found_ids is not None or slot.target.is_shared or float(loss) < best_loss:
            best_ids, best_loss = chosen, float(loss)
        step = Step(loss, output_ids, found_ids=found_ids)
        return step, ARCAState(chosen, best_ids, best_loss)

    def _examples(self, slot: Slot, ids: Tensor, first: int) -> list[Example]:
        """What tokens from a position on are read with: those before it are fixed."""
        if first == 0:
            return list(slot.examples)
        fixed: list[int] = ids.tolist()
        return [replace(e, context=e.context.narrowed(fixed, first)) for e in slot.examples]

    def prompt_ids(self, slot: Slot, state: ARCAState) -> Tensor:
        """The best prompt so far."""
        return state.best_ids
