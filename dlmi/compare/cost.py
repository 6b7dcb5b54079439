"""What a run will cost, known before it begins and without its LM.

A relaxation asks the LM for the same passes in every step. So one step is driven on a stand-in of a
few tokens, which answers nothing but what a pass would cost. A search asks for what its last
answers suggest: what its steps cost, only the run will know.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.base import Relaxation
from dlmi.methods.slot import Slot
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.scoring.evaluation import most_tokens_evaluated
from dlmi.scoring.passes import Account, Cost, Pass, Scores, advance
from dlmi.targets.context import Context
from dlmi.targets.sources import ByRank, Texts
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

_TOKENS, _WIDTH = 8, 4  # of the stand-in


def count_targets(data: TargetDataModule) -> int | None:
    """How many prompts a run looks for; None where only the run will know."""
    if data.share is not None:
        return 1
    if isinstance(data.source, ByRank):
        return len(data.source.k) * data.source.per_k
    return len(data.source.texts) if isinstance(data.source, Texts) else None


def most_token_passes(inverter: Inverter, data: TargetDataModule) -> int | None:
    """Token-passes of one target that is never solved, evaluations included.

    A token budget is never overrun. A budget of steps is that many times what a step costs; None
    where that is not known: for searches, and for targets or templates that the LM has to encode.

    Args:
        inverter: As `fit` would run it.
        data: Its data module; nothing of it is loaded.
    """
    method = inverter.method
    if inverter.token_budget is not None:
        return inverter.token_budget
    is_bare = data.template is None and data.share is None
    if not isinstance(method, Relaxation) or not isinstance(data.source, ByRank) or not is_bare:
        return None
    context = Context(start_ids=(0,) * inverter.prompt_bos)
    target = Target.single("any", (0,) * data.source.length, "", context)
    step = _price_of_step(method, inverter.prompt_length, target)
    every = inverter.eval_every or inverter.steps
    evaluations = 1 + -(-inverter.steps // every) + method.num_last_prompts
    evaluation = most_tokens_evaluated(target, inverter.prompt_length)
    return inverter.steps * step + evaluations * evaluation


def _price_of_step(method: Relaxation, length: int, target: Target) -> int:  # type: ignore[type-arg]
    """Token-passes of one step of a relaxation."""
    vocabulary = Vocabulary(cast(FrozenLM, _StandIn()))
    shapes = method.shapes(length, vocabulary)
    slot = Slot(
        target=target,
        examples=target.examples,
        tokens=vocabulary.for_target(target, key=0),
        params={name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()},
        length=length,
        rng=torch.Generator().manual_seed(0),
    )
    account = Account()
    [start] = advance([method.start(slot)], _Prices(), [account])
    advance([method.step(slot, start.value)], _Prices(), [account])
    return account.cost.total


class _Prices:
    """Knows what a pass costs at most, and answers it with zeros."""

    def price(self, asked: Pass, account: Account) -> Cost:
        """As the engine has it, with nothing kept from pass to pass."""
        tokens = asked.count * sum(
            len(example.context.prefix_ids) + example.tokens_read(asked.length)
            for example in asked.examples
        )
        return Cost(tokens, tokens if asked.has_gradient else 0)

    def __call__(self, passes: Sequence[Pass]) -> list[Scores]:
        """No losses, and the token 0 all over."""
        return [
            Scores(torch.zeros(one.count), torch.zeros(one.count, _said(one), dtype=torch.int64))
            for one in passes
        ]


def _said(asked: Pass) -> int:
    return sum(len(example.ids) for example in asked.examples)


class _StandIn:
    """What a vocabulary needs of an LM: a few tokens that embed to something."""

    name = "a stand-in"
    device = torch.device("cpu")
    prompt_token_ids = torch.arange(_TOKENS)
    embedding_matrix = torch.eye(_TOKENS, _WIDTH)

    def embed(self, ids: Tensor) -> Tensor:
        """Their rows."""
        return self.embedding_matrix[ids]
