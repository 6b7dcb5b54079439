"""Refined: one method first, then a search from the best discrete prompt that it has found.

A relaxed prompt that works seldom stays whole when it is made discrete: the loss of its argmax is
far above its own. So any method may hand over its best discrete prompt at a share of the budget,
and the rest is spent on a search from there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dlmi.errors import check_between
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.methods.base import Defaults, Method, Relaxation, Search, Step
from dlmi.methods.slot import Slot
from dlmi.methods.swap_search import SwapSearch
from dlmi.scoring.passes import Steps
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary


@dataclass(frozen=True)
class RefinedState:
    """What is kept between steps."""

    first: Any  # the state of the first method
    search: Any = None  # the state of the search, once it has begun


@dataclass(frozen=True)
class Refined(Method[RefinedState]):
    """Spend the rest of a budget on a search from the best discrete prompt.

    Args:
        first: What runs first.
        search: What goes on from the best discrete prompt.
        after: Share of the budget that the first method has, 0 to 1.
    """

    # Without their states' types: jsonargparse would make a `Method[Any]`, not a subclass.
    # No `Method` either: it could be this one again, and completion lists all options, for ever.
    first: Relaxation | Search  # type: ignore[type-arg]
    search: Search = SwapSearch(width=16)  # type: ignore[type-arg]  # noqa: RUF009  # it is frozen
    after: float = 0.5

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        check_between("model.method", 0, 1, after=self.after)

    def start(self, slot: Slot) -> Steps[RefinedState]:
        """As the first method."""
        return RefinedState((yield from self.first.start(slot)))

    def step(self, slot: Slot, state: RefinedState) -> Steps[tuple[Step, RefinedState]]:
        """A step of the one or of the other."""
        if state.search is None and slot.progress < self.after:
            step, first = yield from self.first.step(slot, state.first)
            return step, replace(state, first=first)
        search = state.search
        if search is None:
            search = self.search.begin(slot, slot.likeliest_ids)
        step, search = yield from self.search.step(slot, search)
        return step, replace(state, search=search)

    def prompt_ids(self, slot: Slot, state: RefinedState) -> Tensor:
        """The search's, once it has begun."""
        if state.search is None:
            return self.first.prompt_ids(slot, state.first)
        return self.search.prompt_ids(slot, state.search)

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Those of the first method; they rest while the search runs."""
        return self.first.shapes(length, vocabulary)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        """That of the first method."""
        return self.first.optimizer(parameters)

    def defaults(self) -> Defaults:
        """Those of the first method."""
        return self.first.defaults()

    def soft_prompt(self, slot: Slot, state: RefinedState) -> SoftPrompt | None:
        """That of the first method, as it was when the search began."""
        return self.first.soft_prompt(slot, state.first)

    @property
    def num_last_prompts(self) -> int:
        """As the first method."""
        return self.first.num_last_prompts

    def last_prompts(self, slot: Slot, state: RefinedState) -> Tensor:
        """Those of the first method."""
        return self.first.last_prompts(slot, state.first)

    def diagnostics(self, slot: Slot, state: RefinedState) -> dict[str, Tensor]:
        """Those of the first method."""
        return self.first.diagnostics(slot, state.first)

    def check(self, vocabulary: Vocabulary, length: int, targets: Sequence[Target]) -> None:
        """Both must fit."""
        self.first.check(vocabulary, length, targets)
        self.search.check(vocabulary, length, targets)

    def restore(self, plain: Any) -> RefinedState:
        """Each part by its own method."""
        search = plain["search"]
        return RefinedState(
            self.first.restore(plain["first"]),
            None if search is None else self.search.restore(search),
        )
