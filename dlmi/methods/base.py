"""What a method is: a frozen dataclass that holds an equation's symbols and moves one prompt.

It never sees other slots, budgets, costs, devices or files. Where it needs the LM it yields a
`Pass`; `scoring.passes.advance` reads the passes of all slots together.

A `Relaxation` descends: the run owns its tensors (Z, and Phi where temperatures are learned), and
Lightning's optimiser moves them along the loss that a step returns. A `Search` moves from prompt to
prompt itself. What either keeps between steps is its state, a dataclass of tensors and numbers.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.estimators.temperature import row_entropy
from dlmi.methods.slot import Slot
from dlmi.scoring.passes import Pass, Steps
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class Step:
    """The result of a step."""

    loss: Tensor  # what is descended on, (), with its graph; a search's has none
    output_ids: Tensor  # what the step's own pass decoded, (M,): for the as-in-code LCS
    value: Tensor | None = None  # the loss to report where `loss` is only its surrogate, ()
    found_ids: Tensor | None = None  # an exact prompt by teacher forcing, to be decoded, (N,)


@dataclass(frozen=True)
class Defaults:
    """What a run uses where the user sets nothing else."""

    steps: int = 2048  # budget of a target
    eval_every: int | None = 16  # steps between two decodes; None: when it can matter
    token_sets: tuple[str, ...] = ("all",)  # what tokens must be in, besides `allowed_tokens`


class Method(ABC, Generic[State]):
    """Moves the prompt of one slot."""

    state_type: ClassVar[type | None] = None  # the dataclass that it keeps between steps, if any
    reads_embeddings: ClassVar[bool] = False  # its passes hold embeddings, which rules out fluency
    published: ClassVar[Defaults] = Defaults()  # what it was published with
    final_samples: int = 0  # prompts that are tried when the budget is spent, C
    # Intervals of settings; by default an integer is at least 1 and a float is positive
    ranges: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise `InputError` for a setting outside of its range."""
        for name, given in vars(self).items():
            for value in given if isinstance(given, tuple) else (given,):
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                if interval := self.ranges.get(name):
                    _check_within(name, value, interval)
                elif isinstance(value, int):
                    check_at_least_one("model.method", **{name: value})
                else:
                    check_positive("model.method", **{name: value})

    @abstractmethod
    def start(self, slot: Slot) -> Steps[State]:
        """Begin a new target."""

    @abstractmethod
    def step(self, slot: Slot, state: State) -> Steps[tuple[Step, State]]:
        """One step of one slot."""

    @abstractmethod
    def prompt_ids(self, slot: Slot, state: State) -> Tensor:
        """The discrete prompt that the slot stands for now, (N,): what is measured."""

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Shapes of a slot's tensors by name, Z and perhaps Phi; a search has none."""
        return {}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        """The optimiser of these tensors."""
        return None

    def defaults(self) -> Defaults:
        """What a run uses where the user sets nothing else."""
        return self.published

    def soft_prompt(self, slot: Slot, state: State) -> SoftPrompt | None:
        """The distributions over tokens that the slot stands for, where it has them."""
        return None

    @property
    def num_last_prompts(self) -> int:
        """How many more prompts are tried when the budget is spent, C."""
        return self.final_samples

    def last_prompts(self, slot: Slot, state: State) -> Tensor:
        """Those prompts, (C, N); not called where there are none."""
        raise NotImplementedError

    def diagnostics(self, slot: Slot, state: State) -> dict[str, Tensor]:
        """Numbers per position, such as `tau`, (N,)."""
        return {}

    def check(self, vocabulary: Vocabulary, length: int, targets: Sequence[Target]) -> None:
        """Raise `InputError` where settings do not fit the tokens or the length of a prompt."""

    def restore(self, plain: Any) -> State:
        """The state that a checkpoint holds as plain values (`slot.to_plain`)."""
        state: State = msgspec.convert(copy.deepcopy(plain), self.state_type)
        return state


class Relaxation(Method[State]):
    """Descends on relaxed rows: by default on logits Z, (N, V), with Adam."""

    lr: float
    adam_eps: float = 1e-8

    def shapes(self, length: int, vocabulary: Vocabulary) -> Mapping[str, tuple[int, ...]]:
        """Z (N, V)."""
        return {"Z": (length, len(vocabulary))}

    def init(self, slot: Slot) -> State:
        """Fill the slot's tensors for a new target, in place: Z from N(0, 1)."""
        slot.tokens.bar_(slot.draw_normal_("Z"))
        state: State = None if self.state_type is None else self.state_type()  # type: ignore[assignment]
        return state

    def prompt_ids(self, slot: Slot, state: State) -> Tensor:
        """The argmax of Z at each position."""
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
        return Adam(parameters, lr=self.lr, eps=self.adam_eps, fused=True)

    def start(self, slot: Slot) -> Steps[State]:
        """Final: reads nothing."""
        yield from ()
        with torch.no_grad():
            return self.init(slot)


class Search(Method[State]):
    """Moves from discrete prompt to discrete prompt; by default from random tokens."""

    published = Defaults(steps=500, eval_every=None, token_sets=("no_special",))

    def starts(self, slot: Slot) -> Tensor:
        """Prompts, (C, N), of which the likeliest is the first."""
        return slot.tokens.random_ids(1, slot.length, slot.rng)

    def begin(self, slot: Slot, prompt_ids: Tensor) -> State:
        """The state of a search that starts from a prompt, (N,)."""
        state: State = self.state_type(prompt_ids)  # type: ignore[misc]
        return state

    def prompt_ids(self, slot: Slot, state: State) -> Tensor:
        """The prompt that the search is at."""
        prompt_ids: Tensor = state.prompt_ids  # type: ignore[attr-defined]
        return prompt_ids

    def start(self, slot: Slot) -> Steps[State]:
        """Final: the likeliest of the starts; the first, where the LM has yet to reason."""
        ids = slot.tokens.repaired(self.starts(slot).cpu())
        if slot.target.reasons:
            return self.begin(slot, ids[0])
        scores = yield Pass(ids, slot.examples, like_ids=ids[0])
        return self.begin(slot, ids[int(scores.losses.argmin())])


def simplex_prompt(slot: Slot, rows: Tensor) -> SoftPrompt:
    """Rows that lie on the simplex themselves, (N, V), as a soft prompt without noise."""
    rows = rows.detach()
    logits = slot.tokens.bar_(rows.clamp_min(torch.finfo(rows.dtype).tiny).log())
    return SoftPrompt(logits, rows.new_ones(slot.length))


def settings_of(method: Method[Any]) -> dict[str, Any]:
    """A method's arguments as a JSON file has them; those of a wrapped method with its name."""
    settings: dict[str, Any] = {}
    for name, value in vars(method).items():
        if isinstance(value, Method):
            value = {"method": type(value).__name__, **settings_of(value)}
        settings[name] = list(value) if isinstance(value, tuple) else value
    return settings


def _check_within(name: str, value: float, interval: str) -> None:
    """Raise `InputError` for a setting outside of an interval, such as `[0, 1)`."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    is_above = value > low if interval[0] == "(" else value >= low
    is_below = value < high if interval[-1] == ")" else value <= high
    if not (is_above and is_below):
        raise InputError(f"Expected `model.method.{name}` to be in {interval}, but got {value}.")
