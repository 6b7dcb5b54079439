"""A slot: the place in the batch where one target is being inverted."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dlmi.rows import TracePoint
from dlmi.scoring.evaluation import Evaluation
from dlmi.scoring.passes import Account, Cost
from dlmi.targets.context import Example
from dlmi.targets.seeds import hash_seed
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import TargetTokens


@dataclass
class Slot:
    """One target in flight. The first attributes are for methods, the others are the run's."""

    target: Target  # what is to be said
    examples: tuple[Example, ...]  # what this step reads, with the reasoning that the LM wrote
    tokens: TargetTokens  # what the target's prompt may hold
    params: Mapping[str, nn.Parameter]  # Z and Phi, this slot's own
    length: int  # tokens of the prompt, N
    # On the CPU, so that draws are the same on every device; seeded by run seed and target id
    rng: torch.Generator
    step: int = 0  # steps taken
    progress: float = 0.0  # share of the budget that is used
    can_narrow: bool = True  # whether a search may read the end of a prompt alone
    must_confirm: bool = False  # whether passes are in another dtype than measurements

    index: int = 0  # which of the inverter's parameters are its own
    key: int = 0  # seed of noise that is made from counters
    state: Any = None  # what the method keeps between steps
    cost: Cost = field(default_factory=Cost)  # token-passes so far
    # Beginnings whose keys and values it has paid for (`Account`)
    known: list[tuple[int, ...]] = field(default_factory=list)
    known_measured: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0  # wall time spent in the slot
    best: Evaluation | None = None  # the best evaluation so far
    last: Evaluation | None = None  # the latest evaluation
    trace: list[TracePoint] = field(default_factory=list)  # one point for each evaluation
    loss: Tensor | None = None  # training loss of the latest step, ()
    output_ids: Tensor | None = None  # what the latest step's pass decoded, (M,)
    trained_on: tuple[Example, ...] = ()  # the examples of that step
    found_ids: Tensor | None = None  # an exact prompt by teacher forcing, to be decoded, (N,)
    reasoned_ids: tuple[int, ...] = ()  # the discrete prompt that the LM reasoned after
    # What it wrote, by the id of the example
    reasoning: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # The method's numbers per position, at the latest evaluation
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    is_spent: bool = False  # whether its next pass did not fit into the budget
    failure: str | None = None  # why it cannot go on, such as a loss that is NaN
    reset_moments: Callable[[], None] = lambda: None  # drops the optimiser's moments

    # ---- for methods

    def seed(self, purpose: str = "") -> int:
        """A seed for this step, another for each purpose."""
        return hash_seed(f"{self.key}/{self.step}/{purpose}")

    def is_wanted(self, output_ids: Tensor) -> bool:
        """Whether an output, (M,), is what the examples of this step want."""
        return bool(output_ids.tolist() == self.wanted_ids)

    @property
    def wanted_ids(self) -> list[int]:
        """The target tokens of the examples of this step, M of them."""
        return [token_id for example in self.examples for token_id in example.ids]

    def is_better(self, loss: float, best_loss: float) -> bool:
        """Whether a prompt is the best so far, by its loss."""
        # Losses on different examples cannot be compared: then the latest is the best.
        return self.target.is_shared or loss < best_loss

    def surviving(self, ids: Tensor) -> Tensor:
        """Those of some prompts, (C, N), that round-trip, where they must."""
        return self.tokens.surviving(ids) if self.tokens.must_round_trip else ids

    def draw_normal_(self, name: str, std: float = 1.0) -> Tensor:
        """Fill one of its tensors from N(0, std^2), in place."""
        tensor = self.params[name]
        drawn = torch.empty(tensor.shape, dtype=tensor.dtype).normal_(std=std, generator=self.rng)
        return tensor.copy_(drawn)

    @property
    def likeliest_ids(self) -> Tensor:
        """Of the best and the latest prompt the one of lower cross-entropy, (N,)."""
        found = [e for e in (self.best, self.last) if e is not None]
        return torch.tensor(min(found, key=lambda e: e.discrete_loss).prompt_ids)

    # ---- for the run

    def account(self, left: float) -> Account:
        """An account of what it may still spend."""
        return Account(left, self.known, self.known_measured)

    def take(self, loss: Tensor, output_ids: Tensor) -> None:
        """Note the result of a step."""
        self.loss, self.output_ids = loss.detach(), output_ids
        self.trained_on = self.examples
        self.step += 1

    def record(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the trace, and keep the best."""
        self.last = evaluation
        self.found_ids = None
        if self.best is None or evaluation.score > self.best.score:
            self.best = evaluation
        self.trace.append(
            TracePoint(
                step=evaluation.step,
                lcs=evaluation.lcs,
                discrete_loss=evaluation.discrete_loss,
                loss=evaluation.loss,
                as_in_code_lcs=evaluation.as_in_code_lcs,
                seconds=self.seconds,
                token_passes=self.cost.total,
                means={name: float(v.float().mean()) for name, v in self.diagnostics.items()},
            )
        )


def to_plain(value: Any) -> Any:
    """Dataclasses as dictionaries, for a checkpoint that loads with `weights_only=True`."""
    if not dataclasses.is_dataclass(value):
        return value
    return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
