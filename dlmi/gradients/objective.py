r"""What is differentiated: the expected loss of hard prompts, and the loss of any one prompt.

.. math::
    J(Z) = E_{x \sim \prod_i softmax(Z_i)} L(x), \quad
    \frac{\partial J}{\partial Z_{jv}} = \pi_{jv} (E[L \mid x_j = v] - J)

Every estimator is measured against the gradient of this J, whatever relaxed function it really
descends.

Axes: R prompts, N positions, V tokens, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.losses import LossName
from dlmi.passes import target_pass
from dlmi.slots import Slot
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

_HELD_ENTRIES = 2**22  # of hard prompts' embeddings that are held at once


@dataclass(frozen=True)
class Objective:
    """A loss of prompts.

    Attributes:
        matrix: What each token embeds to, (V, d).
        loss: Prompts' embeddings, (R, N, d), to their losses, (R,), with their graph.
    """

    matrix: Tensor
    loss: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def hard_losses(self, columns: Tensor) -> Tensor:
        """L of discrete prompts, a part of them at a time: (R, N) to (R,)."""
        size = max(1, _HELD_ENTRIES // (columns.shape[1] * self.matrix.shape[1]))
        # Losses come in the dtype of the prompts; a half's would be rounded.
        dtype = torch.promote_types(self.matrix.dtype, torch.float32)
        parts = torch.split(columns, size)
        return torch.cat([self.loss(self.matrix[part].to(dtype)) for part in parts])


def target_objective(
    vocabulary: Vocabulary, target: Target, loss: LossName, teacher_forcing: bool, prompt_bos: bool
) -> Objective:
    """The loss of a target, as training computes it; nobody's slot is charged."""
    lm = vocabulary.lm
    payer = Slot.open(0, target, 0, lm.device)

    def losses(prompt_embeds: Tensor) -> Tensor:
        rows, _ = target_pass(lm, [payer], prompt_embeds[None], loss, teacher_forcing, prompt_bos)
        return rows[0]

    return Objective(vocabulary.matrix, losses)


@torch.no_grad()
def sample_prompts(logits: Tensor, count: int, seed: int) -> Tensor:
    """Independent hard prompts from softmax(Z): (N, V) to (count, N).

    In float64 and on the CPU: a cumulative sum over a large vocabulary in float32 would shift the
    probabilities of rare tokens by per cents, and the draws are to be the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(logits.detach().cpu().double(), dim=-1)
    columns = torch.multinomial(probabilities, count, replacement=True, generator=generator)
    return columns.T.contiguous().to(logits.device)
