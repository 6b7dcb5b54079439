"""Slots, prompts and steps by hand: methods driven without a run, and without an LM."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dlmi.methods.base import Method, Step
from dlmi.methods.slot import Slot
from dlmi.scoring.engine import Engine
from dlmi.scoring.passes import Account, Cost, Pass, Scores, Steps, advance
from dlmi.targets.seeds import hash_seed
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

CPU = torch.device("cpu")


def random_ids(lm, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lm.prompt_token_ids[torch.randint(len(lm.prompt_token_ids), shape, generator=generator)]


def open_slot(
    vocabulary: Vocabulary,
    target: Target,
    length: int = 5,
    method: Method[Any] | None = None,
    seed: int = 0,
) -> Slot:
    """A slot for a target; with a method, it has the tensors that this one optimises."""
    key = hash_seed(f"{seed}/{target.id}")
    shapes = {} if method is None else method.shapes(length, vocabulary)
    return Slot(
        target=target,
        examples=target.minibatch(0, key),
        tokens=vocabulary.for_target(target, key),
        params={n: nn.Parameter(torch.zeros(s, dtype=torch.float64)) for n, s in shapes.items()},
        length=length,
        rng=torch.Generator().manual_seed(key),
        key=key,
    )


def drive(steps: Steps[Any], answer: Callable[[Pass], Scores]) -> Any:
    """Run a step to its end with made-up scores."""
    try:
        asked = next(steps)
        while True:
            asked = steps.send(answer(asked))
    except StopIteration as end:
        return end.value


def begin(method: Method[Any], slot: Slot, engine: Engine) -> Slot:
    """Start a slot's target, charged to the slot."""
    account = slot.account(float("inf"))
    [outcome] = advance([method.start(slot)], engine, [account])
    slot.state, slot.cost = outcome.value, slot.cost + account.cost
    return slot


def take_steps(method: Method[Any], slots: Sequence[Slot], engine: Engine) -> list[Step]:
    """One step of each slot, side by side, charged to the slots."""
    accounts = [slot.account(float("inf")) for slot in slots]
    made = []
    for slot, outcome, account in zip(
        slots,
        advance([method.step(slot, slot.state) for slot in slots], engine, accounts),
        accounts,
        strict=True,
    ):
        step, slot.state = outcome.value
        slot.cost += account.cost
        slot.step += 1
        made.append(step)
    return made


class MadeUp:
    """A reader for `advance` that knows no LM: every pass costs the same.

    Args:
        cost: Of each pass.

    Attributes:
        rounds: How many passes were asked for at the same time, round by round.
    """

    def __init__(self, cost: int = 1) -> None:
        self.cost = cost
        self.rounds: list[int] = []

    def price(self, asked: Pass, account: Account) -> Cost:
        return Cost(self.cost)

    def __call__(self, passes: Sequence[Pass]) -> list[Scores]:
        self.rounds.append(len(passes))
        return [
            Scores(torch.arange(float(asked.count)), torch.zeros(asked.count, 1, dtype=torch.long))
            for asked in passes
        ]
