"""What a step asks of the LM, and how the steps of several slots run together.

A step of a method is a generator, written for one slot: it yields a `Pass` wherever it needs the
LM, is sent the `Scores`, and returns its result. `advance` runs the steps of all slots side by side
and hands the passes that they ask for at the same time to one reader, so that these share LM calls.
It also charges for them: the cost of a pass is known before it is made, and a pass that the budget
does not cover is not made.

Cost is counted in token-passes: a token sent forward through the LM counts 1, and 1 more if a
gradient comes back. It is what a pass would read alone, without padding, so it depends neither on
other slots nor on the device. A prefix whose keys and values are kept counts once for each slot.

Axes: C prompts of a pass, N prompt tokens, M target tokens, K swaps of a position, d width.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.lm.norm_gradients import NormGradientScale
from dlmi.scoring.losses import LossName
from dlmi.targets.context import Example, common_beginning
from dlmi.tokens.vocabulary import TargetTokens

T = TypeVar("T")

REMEMBERED = 4  # prefixes that a slot has read, the latest ones
NO_SWAP = -1  # in place of a token


@dataclass(frozen=True)
class Cost:
    """Token-passes."""

    forward: int = 0  # tokens sent forward through the LM
    backward: int = 0  # tokens that a gradient came back through

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> int:
        """What budgets are counted in."""
        return self.forward + self.backward


@dataclass(frozen=True)
class RelaxedNextToken:
    """A Gumbel-Softmax sample, which a free run reads in place of its greedy token."""

    tau: float  # its temperature
    seed: int  # of its noise


@dataclass(frozen=True, eq=False)
class Swaps:
    """Asks which tokens the gradient, with respect to one-hot rows, would put into a prompt."""

    tokens: TargetTokens  # what the prompt may hold
    count: int  # how many are wanted at each position, K
    barred: Tensor | None = None  # positions and tokens that are not, (.., 2)
    momentum: float = 0.0  # weight of `carried` in the average with the normalised gradient
    carried: Tensor | None = None  # `Scores.carried` of the step before, (N, d)


@dataclass(frozen=True, eq=False)
class Pass:
    """Prompts of one slot that the LM is to read."""

    # Token ids, (C, N); or embeddings, (C, N, d); or a soft prompt and its C samples
    prompts: Tensor | SoftPrompt
    examples: Sequence[Example]  # what each of them is read with; a loss is the mean over these
    loss: LossName = "cross_entropy"  # which loss
    teacher_forcing: bool = True  # feed the target's own prefix; else run freely
    next_token: RelaxedNextToken | None = None  # of a free run; None: the greedy token
    swaps: Swaps | None = None  # of discrete prompts, by their mean gradient
    token_weights: Tensor | None = None  # of target tokens in the loss, (M,); None: all the same
    # A prompt, (N,), that the others are variations of: what they share with it is read once
    like_ids: Tensor | None = None
    norm_gradient_scale: NormGradientScale = 1.0  # factor on gradients at the LM's norm layers
    is_measured: bool = False  # in the LM's own dtype, whatever other passes are in
    # Whether the method looks at the scores, which are on the CPU then; None: if there is no graph
    is_seen: bool | None = None
    beside: Tensor | None = None  # another small tensor that the method wants to look at

    @property
    def count(self) -> int:
        """Prompts, C."""
        return self.prompts.samples if isinstance(self.prompts, SoftPrompt) else len(self.prompts)

    @property
    def length(self) -> int:
        """Tokens of a prompt, N."""
        prompts = self.prompts
        return len(prompts.logits) if isinstance(prompts, SoftPrompt) else prompts.shape[1]

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back through the LM."""
        if isinstance(self.prompts, SoftPrompt):
            return self.prompts.logits.requires_grad
        return self.swaps is not None or self.prompts.requires_grad

    @property
    def is_base(self) -> bool:
        """Whether it is one discrete prompt, which later ones may vary: `like_ids` itself."""
        if self.like_ids is None or not isinstance(self.prompts, Tensor) or self.count != 1:
            return False
        return self.prompts[0].equal(self.like_ids)

    @property
    def target_length(self) -> int:
        """Tokens to be said in all examples, M."""
        return sum(len(example.ids) for example in self.examples)


@dataclass(frozen=True, eq=False)
class Scores:
    """The result of a pass."""

    losses: Tensor  # of each prompt, (C,), with a graph where the prompts have one
    output_ids: Tensor  # what the pass decoded after each, in all examples, (C, M)
    # With `swaps`, the tokens that lower the loss most, to first order, at each position, (N, K);
    # `NO_SWAP` where there are fewer
    swap_ids: Tensor | None = None
    carried: Tensor | None = None  # with momentum, the average of normalised gradients, (N, d)
    values: Tensor | None = None  # the losses on the CPU, (C,), if they have a graph and are seen
    beside: Tensor | None = None  # that of the pass, on the CPU

    @property
    def seen_losses(self) -> Tensor:
        """The losses without a graph, (C,); on the CPU where the method looks at them."""
        return self.losses.detach() if self.values is None else self.values


Steps = Generator[Pass, Scores, T]


@dataclass
class Account:
    """What one slot may spend, and what it has read before."""

    left: float = float("inf")  # token-passes that it may still spend
    # Prefixes whose keys and values it has paid for, the latest last
    known: list[tuple[int, ...]] = field(default_factory=list)
    # The same in the LM's own dtype, where that is not the dtype of passes
    known_measured: list[tuple[int, ...]] = field(default_factory=list)
    cost: Cost = Cost()  # what it has spent since the account was opened

    def learn(self, ids: tuple[int, ...], is_measured: bool = False) -> int:
        """Note that a prefix is read; returns how many of its tokens were not read before."""
        known = self.known_measured if is_measured else self.known
        new = len(ids) - max((len(common_beginning([ids, k])) for k in known), default=0)
        if ids and new:
            known.append(ids)
            del known[:-REMEMBERED]
        return new

    def charge(self, cost: Cost) -> bool:
        """Spend, if that much is left."""
        if cost.total > self.left:
            return False
        self.left -= cost.total
        self.cost += cost
        return True


class Reader(Protocol):
    """Answers passes: the engine, or a stand-in in tests."""

    def price(self, asked: Pass, account: Account) -> Cost:
        """What a pass costs a slot; notes in its account what it will have read."""

    def __call__(self, passes: Sequence[Pass]) -> Sequence[Scores]:
        """The scores of passes of several slots."""


@dataclass
class Outcome(Generic[T]):
    """The end of one slot's step."""

    value: T | None = None  # what it returned; None where the budget did not cover a pass


def advance(
    steps: Sequence[Steps[T]], reader: Reader, accounts: Sequence[Account]
) -> list[Outcome[T]]:
    """Run steps of several slots side by side; one whose next pass is not covered ends there.

    Passes with a gradient are answered first.
    """
    outcomes: list[Outcome[T]] = [Outcome() for _ in steps]
    answers: dict[int, Scores | None] = dict.fromkeys(range(len(steps)))
    asked: dict[int, Pass] = {}
    while answers:
        for i, answer in answers.items():
            try:
                wanted = steps[i].send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                outcomes[i].value = end.value
                continue
            if accounts[i].charge(reader.price(wanted, accounts[i])):
                asked[i] = wanted
            else:
                steps[i].close()
        # The others wait, and share calls with what comes after these.
        with_gradient = [i for i, one in asked.items() if one.has_gradient]
        chosen = {i: asked.pop(i) for i in with_gradient or list(asked)}
        answers = dict(zip(chosen, reader(list(chosen.values())), strict=True)) if chosen else {}
    return outcomes
