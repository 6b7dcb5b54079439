"""The honest measurement: a discrete prompt, really decoded.

`evaluate_prompts` is all that decides what is best so far and when a target is solved. The prompt
is a row of token ids, the decode is free and greedy, and EoS does not end it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.lm import FrozenLM
from dlmi.losses import LossName, target_loss, target_mask
from dlmi.metrics import lcs_ratio
from dlmi.targets import Target


@dataclass(frozen=True)
class Evaluation:
    """A discrete prompt, what the LM says to it, and how close that is to the target.

    Attributes:
        step: Optimisation steps before this evaluation.
        prompt_ids: The discrete prompt.
        output_ids: Its greedy decode, as long as the target.
        lcs: Honest LCS ratio.
        discrete_loss: Teacher-forced cross-entropy of the target after the discrete prompt.
        loss: Training loss of the last step before, on the relaxed prompt; None at step 0.
        as_in_code_lcs: LCS of the relaxed prompt under the training decode (what the authors'
            public code logs); None at step 0.
    """

    step: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    lcs: float
    discrete_loss: float
    loss: float | None = None
    as_in_code_lcs: float | None = None

    @property
    def score(self) -> tuple[float, float]:
        """What makes a prompt the best: honest LCS first, then low cross-entropy."""
        return self.lcs, -self.discrete_loss


def pad_targets(targets: Sequence[Target], device: torch.device) -> tuple[Tensor, Tensor]:
    """Targets as one tensor padded on the right, (R, M), and the mask of its real tokens."""
    lengths = torch.tensor([len(t.ids) for t in targets], device=device)
    width = int(lengths.max())
    rows = [[*t.ids, *[t.ids[-1]] * (width - len(t.ids))] for t in targets]
    return torch.tensor(rows, device=device), target_mask(lengths, width)


def with_bos(lm: FrozenLM, prompt_ids: Tensor, prompt_bos: bool) -> Tensor:
    """Put BoS before each prompt, (R, N) to (R, N+1), if asked."""
    if not prompt_bos:
        return prompt_ids
    return torch.cat([torch.full_like(prompt_ids[:, :1], lm.bos_id), prompt_ids], dim=1)


@torch.no_grad()
def evaluate_prompts(
    lm: FrozenLM,
    prompt_ids: Tensor,
    targets: Sequence[Target],
    steps: Sequence[int],
    prompt_bos: bool = False,
) -> list[Evaluation]:
    """Decode discrete prompts greedily, side by side.

    Args:
        lm: The model.
        prompt_ids: (R, N).
        targets: R of them; their lengths may differ.
        steps: Optimisation steps that each prompt has had.
        prompt_bos: Put BoS before each prompt.
    """
    target_ids, mask = pad_targets(targets, lm.device)
    full_ids = with_bos(lm, prompt_ids, prompt_bos)
    logits = lm.target_logits(lm.embed(full_ids), target_ids)
    losses = target_loss("cross_entropy", logits, target_ids, mask).tolist()
    outputs = lm.greedy(full_ids, target_ids.shape[1]).tolist()
    evaluations = []
    for row, target in enumerate(targets):
        output_ids = tuple(outputs[row][: len(target.ids)])
        evaluations.append(
            Evaluation(
                step=steps[row],
                prompt_ids=tuple(prompt_ids[row].tolist()),
                output_ids=output_ids,
                lcs=lcs_ratio(target.ids, output_ids),
                discrete_loss=losses[row],
            )
        )
    return evaluations


@torch.no_grad()
def score_prompts(
    lm: FrozenLM,
    prompt_ids: Tensor,
    target: Target,
    loss: LossName = "cross_entropy",
    prompt_bos: bool = False,
    rows_per_pass: int = 64,
) -> tuple[Tensor, Tensor]:
    """Teacher-forced scores of many discrete prompts for one target, in bounded memory.

    Args:
        lm: The model.
        prompt_ids: (C, N).
        target: The one target.
        loss: Which loss.
        prompt_bos: Put BoS before each prompt.
        rows_per_pass: Prompts per pass through the LM.

    Returns:
        The loss of each prompt, (C,), and what teacher forcing decodes after it, (C, M). A prompt
        that decodes the target this way also produces it in a free greedy run.
    """
    target_ids, mask = pad_targets([target], lm.device)
    losses, outputs = [], []
    for rows in torch.split(with_bos(lm, prompt_ids, prompt_bos), rows_per_pass):
        expanded = target_ids.expand(len(rows), -1)
        logits = lm.target_logits(lm.embed(rows), expanded)
        losses.append(target_loss(loss, logits, expanded, mask.expand(len(rows), -1)))
        outputs.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(outputs)
