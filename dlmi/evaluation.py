"""The honest measurement: a discrete prompt, really decoded.

`evaluate_prompts` is all that decides what is best so far and when a target is solved. The prompt
is a row of token ids, the decode is free and greedy, and EoS does not end it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.lm import FrozenLM
from dlmi.losses import target_loss, target_mask
from dlmi.metrics import lcs_ratio
from dlmi.prefix import Prefix
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
        is_eligible: Whether it may be the best; if none may, the best of the others is.
    """

    step: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    lcs: float
    discrete_loss: float
    loss: float | None = None
    as_in_code_lcs: float | None = None
    is_eligible: bool = True

    @property
    def score(self) -> tuple[bool, float, float]:
        """What makes a prompt the best: that it may be, honest LCS, then low cross-entropy."""
        return self.is_eligible, self.lcs, -self.discrete_loss


def pad_targets(targets: Sequence[Target], device: torch.device) -> tuple[Tensor, Tensor]:
    """Targets as one tensor padded on the right, (R, M), and the mask of its real tokens."""
    return _pad(tuple(target.ids for target in targets), device)


@functools.lru_cache(maxsize=16)  # a batch keeps its targets for many steps
def _pad(targets: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(ids) for ids in targets], device=device)
    width = int(lengths.max())
    rows = [[*ids, *[ids[-1]] * (width - len(ids))] for ids in targets]
    return torch.tensor(rows, device=device), target_mask(lengths, width)


def bos_prefix(lm: FrozenLM) -> Prefix:
    """BoS before a prompt."""
    return lm.prefix([lm.bos_id])


def decoded_tokens(target: Target, output_ids: Sequence[int]) -> int:
    """Tokens that the free run had to read beyond the teacher-forced pass before it."""
    pairs = zip(target.ids, output_ids, strict=True)
    right = next((i for i, (wanted, got) in enumerate(pairs) if wanted != got), len(target.ids))
    return max(0, len(target.ids) - 1 - right)


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
    length = target_ids.shape[1]
    prefix = bos_prefix(lm) if prompt_bos else None
    losses: list[float] = []
    outputs: list[list[int]] = []

    def work(rows: slice) -> None:
        logits, output_ids = lm.forced_and_greedy(
            lm.embed(prompt_ids[rows]), target_ids[rows], prefix
        )
        losses.extend(target_loss("cross_entropy", logits, target_ids[rows], mask[rows]).tolist())
        outputs.extend(output_ids.tolist())

    lm.rows_per_pass.run(lm, len(targets), prompt_ids.shape[1] + length - 1, length, work)
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
