"""What a method is: a plain, frozen object that holds an equation's symbols and moves one prompt.

It never sees other slots, budgets, costs, devices or files. Where it needs the LM it yields a
`Pass`; whoever drives it (`scoring.passes.advance`) reads the passes of all slots together.

A `Relaxation` descends: the run owns its tensors (Z, and Phi where temperatures are learned), and
Lightning's optimiser moves them along the loss that a step returns. A `Search` moves from prompt to
prompt itself: it has no tensors and no optimiser. What either keeps between steps is a typed state,
a dataclass of tensors and numbers, which is handed in and given back.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.estimators.temperature import row_entropy
from dlmi.methods.slot import Slot
from dlmi.methods.states import from_plain
from dlmi.scoring.passes import Pass, Steps
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class Step:
    """What a step gives."""

    loss: Tensor  # what is descended, (), with its graph; without one, nothing is
    output_ids: Tensor  # what the step's own pass decoded, (M,): the as-in-code LCS is of these
    value: Tensor | None = None  # the loss to report where `loss` is only its surrogate, ()
    # A prompt that teacher forcing has just shown to be exact, (N,): decode it now
    found_ids: Tensor | None = None


@dataclass(frozen=True)
class Defaults:
    """What a run takes where the user names nothing else."""

    steps: int = 2048  # budget of a target
    eval_every: int | None = 16  # steps between two decodes; None: when it can matter
    # Sets that a prompt's tokens must be in, besides `allowed_tokens`
    token_sets: tuple[str, ...] = ("all",)


class Method(ABC, Generic[State]):
    """Moves the prompt of one slot.

    Attributes:
        state_type: The dataclass that it keeps between steps; None if it keeps nothing.
        reads_embeddings: Whether its passes hold embeddings rather than tokens, which no penalty on
            unlikely prompts can be computed for.
    """

    state_type: ClassVar[type | None] = None
    reads_embeddings: ClassVar[bool] = False

    @abstractmethod
    def start(self, slot: Slot) -> Steps[State]:
        """Begin a new target."""

    @abstractmethod
    def step(self, slot: Slot, state: State) -> Steps[tuple[Step, State]]:
        """One step of one slot."""

    @abstractmethod
    def prompt_ids(self, slot: Slot, state: State) -> Tensor:
        """The discrete prompt that the slot stands for now, (N,): what is measured, always."""

    @abstractmethod
    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Tensors of a slot by name, which Lightning optimises: Z, and Phi; none of a search."""

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        """What descends on them."""

    def defaults(self) -> Defaults:
        """What it was published with."""
        return Defaults()

    def soft_prompt(self, slot: Slot, state: State) -> SoftPrompt | None:
        """The distributions over tokens that the slot stands for, where it has them.

        They are what the LCS matrix and the gradient study look at.
        """
        return None

    @property
    def num_last_prompts(self) -> int:
        """How many more prompts are tried when the budget is spent, C."""
        return 0

    def last_prompts(self, slot: Slot, state: State) -> Tensor:
        """Those prompts, (C, N); not called where there are none."""
        raise NotImplementedError

    def diagnostics(self, slot: Slot, state: State) -> dict[str, Tensor]:
        """Numbers per position, such as `tau`, (N,)."""
        return {}

    def check(self, vocabulary: Vocabulary, length: int, targets: Sequence[Target]) -> None:
        """Raise `InputError` where its settings do not fit the tokens or the length of a prompt."""

    def restore(self, plain: Any) -> State:
        """A state from what a checkpoint holds of it (`states.to_plain`)."""
        state: State = from_plain(self.state_type, plain)
        return state


class Relaxation(Method[State]):
    """Descends on relaxed rows: unless it says otherwise on logits Z, (N, V), with Adam."""

    lr: float

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V)."""
        return {"Z": (length, len(vocabulary))}

    def init(self, slot: Slot) -> State:
        """Fill the slot's tensors for a new target, in place: Z from N(0, 1)."""
        slot.tokens.bar_(slot.draw_normal_("Z"))
        state: State = None if self.state_type is None else self.state_type()  # type: ignore[assignment]
        return state

    def prompt_ids(self, slot: Slot, state: State) -> Tensor:
        """The largest logit of each position."""
        return slot.tokens.argmax_ids(slot.params["Z"])

    @torch.no_grad()
    def diagnostics(self, slot: Slot, state: State) -> dict[str, Tensor]:
        """Entropy of each position's noise-free row, and its temperature where there is noise."""
        prompt = self.soft_prompt(slot, state)
        if prompt is None:
            return {}
        entropy = row_entropy(prompt.logits, prompt.tau)
        return {**({"tau": prompt.tau} if prompt.estimator else {}), "entropy": entropy}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Adam on all of them."""
        return Adam(parameters, lr=self.lr, fused=True)

    def start(self, slot: Slot) -> Steps[State]:
        """Final: needs no LM."""
        yield from ()
        with torch.no_grad():
            return self.init(slot)


class Search(Method[State]):
    """Moves from discrete prompt to discrete prompt."""

    @abstractmethod
    def starts(self, slot: Slot) -> Tensor:
        """Prompts of which the likeliest is the first, (C, N)."""

    @abstractmethod
    def begin(self, slot: Slot, prompt_ids: Tensor) -> State:
        """The state of a search that starts from a prompt, (N,)."""

    def start(self, slot: Slot) -> Steps[State]:
        """Final: the likeliest of the starts; the first, where the LM has yet to reason."""
        ids = slot.tokens.repaired(self.starts(slot).cpu())
        if slot.target.reasons:
            return self.begin(slot, ids[0])
        scores = yield Pass(ids, slot.examples, like_ids=ids[0])
        return self.begin(slot, ids[int(scores.losses.argmin())])

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Final: nothing to descend on."""
        return {}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        """Final: none."""
        return None


def settings_of(method: Method[Any]) -> dict[str, Any]:
    """A method's arguments as a JSON file has them; those of a wrapped method with its name."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if isinstance(value, Method):
            value = {"method": type(value).__name__, **settings_of(value)}
        settings[field.name] = list(value) if isinstance(value, tuple) else value
    return settings
