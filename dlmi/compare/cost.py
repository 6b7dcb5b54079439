"""An upper bound of a run's cost, without loading its LM.

A relaxation asks for the same passes in every step, so one step is run on a tiny vocabulary and its
passes are counted. What a search asks for depends on the LM's answers: its steps have no bound.
"""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.base import Relaxation
from dlmi.methods.slot import Slot
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.scoring.evaluation import most_tokens_evaluated
from dlmi.scoring.passes import Scores
from dlmi.targets.context import Context
from dlmi.targets.sources import ByRank, Texts
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

_TOKENS, _WIDTH = 8, 4  # of the stand-in


def count_targets(data: TargetDataModule) -> int | None:
    """The number of prompts that a run looks for; None where only the LM's tokenizer knows."""
    if data.share is not None:
        return 1
    if isinstance(data.source, ByRank):
        return len(data.source.k) * data.source.per_k
    return len(data.source.texts) if isinstance(data.source, Texts) else None


def most_token_passes(inverter: Inverter, data: TargetDataModule) -> int | None:
    """Token-passes of one target that is never solved, evaluations included.

    None for a search without a token budget, and for targets or templates that the LM encodes.
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


def _price_of_step(method: Relaxation[Any], length: int, target: Target) -> int:
    """Token-passes of one step without cached prefixes."""
    matrix = torch.eye(_TOKENS, _WIDTH)
    stand_in = SimpleNamespace(
        prompt_token_ids=torch.arange(_TOKENS),
        embedding_matrix=matrix,
        embed=matrix.__getitem__,
        device=matrix.device,
    )
    vocabulary = Vocabulary(cast(FrozenLM, stand_in))
    shapes = method.shapes(length, vocabulary)
    slot = Slot(
        target=target,
        examples=target.examples,
        tokens=vocabulary.for_target(target, key=0),
        params={name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()},
        length=length,
        rng=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        state = method.init(slot)
    read_alone = sum(len(e.context.prefix_ids) + e.tokens_read(length) for e in target.examples)
    step, cost = method.step(slot, state), 0
    with suppress(StopIteration):
        asked = next(step)
        while True:
            cost += asked.count * read_alone * (2 if asked.has_gradient else 1)
            output_ids = torch.zeros(asked.count, len(target.ids), dtype=torch.int64)
            losses = torch.zeros(asked.count)
            asked = step.send(Scores(losses, output_ids, beside=asked.beside))
    return cost
