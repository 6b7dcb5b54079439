r"""The step that GCG, MAC and AutoPrompt share: score some swaps of a prompt, keep the best.

.. math::
    x \leftarrow \arg\min_{x' \in B} d(f(x'), y)

The methods differ in how the gradient at x proposes the candidates B.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.methods.base import Step
from dlmi.methods.slot import Slot
from dlmi.scoring.losses import LossName
from dlmi.scoring.passes import NO_SWAP, Pass, Scores, Steps


@dataclass
class PromptState:
    """What a search keeps between steps."""

    prompt_ids: Tensor  # x, (N,)


def keep_best(
    slot: Slot, loss: LossName, x: Tensor, now: Scores, candidates: Tensor, may_worsen: bool = False
) -> Steps[tuple[Step, Tensor]]:
    """Move from x, (N,), to the best of some variations of it, (C, N), if that is better.

    Returns the step, which reports the scores that x has now, and the next prompt, (N,). With
    `may_worsen` the best candidate is taken even if it is worse than x.
    """
    step = Step(now.losses[0], now.output_ids[0])
    if len(candidates) == 0:
        return step, x
    tried = yield Pass(candidates, slot.examples, loss, like_ids=x)
    i = int(tried.losses.argmin())
    best, best_loss, output_ids = candidates[i], tried.losses[i], tried.output_ids[i]
    x_loss = step.loss
    if slot.must_confirm:
        both = torch.stack([x, best])
        measured = yield Pass(both, slot.examples, loss, like_ids=x, is_measured=True)
        (x_loss, best_loss), output_ids = measured.losses, measured.output_ids[1]
    if best_loss >= x_loss and not may_worsen:
        return step, x
    found_ids = best if slot.is_wanted(output_ids) else None
    return Step(step.loss, step.output_ids, found_ids=found_ids), best


def swapped_at(ids: Tensor, position: int, tokens: Tensor) -> Tensor:
    """Copies of a prompt, (N,), with other tokens, (C,), at one position; `NO_SWAP` gives none.

    >>> swapped_at(torch.tensor([1, 2, 3]), 1, torch.tensor([8, 9, NO_SWAP]))
    tensor([[1, 8, 3],
            [1, 9, 3]])
    """
    tokens = tokens[tokens != NO_SWAP]
    copies = ids.repeat(len(tokens), 1)
    copies[:, position] = tokens
    return copies
