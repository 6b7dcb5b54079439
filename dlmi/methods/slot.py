"""A slot: the place in the batch where one target is being inverted."""

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
    """One target in flight. The first attributes are for methods, the others are the run's.

    Attributes:
        target: What is to be said.
        examples: What this step reads: all, or a mini-batch of a shared prompt, with the LM's own
            reasoning written where it reasons.
        tokens: What the target's prompt may hold.
        params: Z and Phi, this slot's own.
        length: Tokens of the prompt, N.
        rng: Random numbers, seeded from the run's seed and the target's id alone.
        step: Steps taken.
        progress: Share of the budget that is used.
        can_narrow: Whether a search may read the end of a prompt alone.
        index: Which of the inverter's parameters are its own.
        key: Seed of noise that is made from counters.
        state: What the method keeps between steps.
        cost: Token-passes so far.
        known: Beginnings of prompts that it has paid for.
        seconds: Wall time spent in the slot.
        best: The best evaluation so far.
        last: The latest evaluation.
        trace: One point for each evaluation.
        loss: Training loss of the latest step, ().
        output_ids: What the latest step's pass decoded, (M,).
        trained_on: The examples of that step.
        found_ids: A prompt that teacher forcing has shown to be exact, to be decoded.
        reasoned_ids: The discrete prompt that the LM has written its reasoning after.
        reasoning: What it wrote, by the id of the example.
        diagnostics: The method's numbers per position, at the latest evaluation.
        is_spent: Whether its next pass did not fit into the budget.
        failure: Why it cannot go on, such as a loss that is NaN.
        reset_moments: Lets the optimiser start anew on the slot's tensors.
    """

    target: Target
    examples: tuple[Example, ...]
    tokens: TargetTokens
    params: Mapping[str, nn.Parameter]
    length: int
    rng: torch.Generator
    step: int = 0
    progress: float = 0.0
    can_narrow: bool = True

    index: int = 0
    key: int = 0
    state: Any = None
    cost: Cost = field(default_factory=Cost)
    known: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0
    best: Evaluation | None = None
    last: Evaluation | None = None
    trace: list[TracePoint] = field(default_factory=list)
    loss: Tensor | None = None
    output_ids: Tensor | None = None
    trained_on: tuple[Example, ...] = ()
    found_ids: Tensor | None = None
    reasoned_ids: tuple[int, ...] = ()
    reasoning: dict[str, tuple[int, ...]] = field(default_factory=dict)
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    is_spent: bool = False
    failure: str | None = None
    reset_moments: Callable[[], None] = lambda: None

    # ---- for methods

    def seed(self, purpose: str = "") -> int:
        """A seed of its own for each step, and for each purpose within it."""
        return hash_seed(f"{self.key}/{self.step}/{purpose}")

    def is_wanted(self, output_ids: Tensor) -> bool:
        """Whether an output, (M,), is what the examples of this step want."""
        wanted = [token_id for example in self.examples for token_id in example.ids]
        said: list[int] = output_ids.tolist()
        return said == wanted

    def forget_moments(self) -> None:
        """Let the optimiser start anew on the slot's tensors, as for a new target."""
        self.reset_moments()

    @property
    def likeliest_ids(self) -> Tensor:
        """Of the best and the latest prompt the one of lower cross-entropy, (N,)."""
        found = [e for e in (self.best, self.last) if e is not None]
        return torch.tensor(min(found, key=lambda e: e.discrete_loss).prompt_ids)

    # ---- for the run

    def account(self, left: float) -> Account:
        """An account of what it may still spend."""
        return Account(left, self.known)

    def take(self, loss: Tensor, output_ids: Tensor) -> None:
        """Note what a step has given."""
        self.loss, self.output_ids = loss.detach(), output_ids
        self.trained_on = self.examples
        self.step += 1

    def record(self, evaluation: Evaluation) -> None:
        """Keep an evaluation, and the best of them all."""
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
