"""Refined: one method first, then a search from the best discrete prompt that it has found.

The argmax of a relaxed prompt that works often has a far higher loss than the relaxed prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

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
    # No `Method` either: it could be this one again, and completion would list options for ever.
    first: Relaxation | Search  # type: ignore[type-arg]
    search: Search = SwapSearch(width=16)  # type: ignore[type-arg]  # noqa: RUF009  # it is frozen
    after: float = 0.5

    ranges: ClassVar = {"after": "[0, 1]"}

    def start(self, slot: Slot) -> Steps[RefinedState]:
        """As the first method."""
        return RefinedState((yield from self.first.start(slot)))

    def step(self, slot: Slot, state: RefinedState) -> Steps[tuple[Step, RefinedState]]:
        """A step of the first method, or of the search."""
        if state.search is None and slot.progress < self.after:
            step, first = yield from self.first.step(slot, state.first)
            return step, replace(state, first=first)
        search = state.search or self.search.begin(slot, slot.likeliest_ids)
        step, search = yield from self.search.step(slot, search)
        return step, replace(state, search=search)

    def prompt_ids(self, slot: Slot, state: RefinedState) -> Tensor:
        """The search's, once it has begun."""
        if state.search is None:
            return self.first.prompt_ids(slot, state.first)
        return self.search.prompt_ids(slot, state.search)

    def check(self, vocabulary: Vocabulary, length: int, targets: Sequence[Target]) -> None:
        """Both must fit."""
        self.first.check(vocabulary, length, targets)
        self.search.check(vocabulary, length, targets)

    def restore(self, plain: Any) -> RefinedState:
        """Each part by its own method."""
        first, search = self.first.restore(plain["first"]), plain["search"]
        return RefinedState(first, None if search is None else self.search.restore(search))

    # ---- as the first method, whose tensors rest while the search runs
    # ruff: noqa: D102

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        return self.first.shapes(length, vocabulary)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        return self.first.optimizer(parameters)

    def defaults(self) -> Defaults:
        return self.first.defaults()

    def soft_prompt(self, slot: Slot, state: RefinedState) -> SoftPrompt | None:
        return self.first.soft_prompt(slot, state.first)

    @property
    def num_last_prompts(self) -> int:
        return self.first.num_last_prompts

    def last_prompts(self, slot: Slot, state: RefinedState) -> Tensor:
        return self.first.last_prompts(slot, state.first)

    def diagnostics(self, slot: Slot, state: RefinedState) -> dict[str, Tensor]:
        return self.first.diagnostics(slot, state.first)
