"""The honest measurement: a discrete prompt, really decoded.

`evaluate_prompts` is all that decides what is best so far and when a target is solved. The prompt
is a row of token ids, the decode is free and greedy, and EoS does not end it. A prompt that several
examples share is read with each of them: its LCS and its loss are the means.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.frames import Example
from dlmi.layouts import lay_out
from dlmi.lm import FrozenLM
from dlmi.losses import target_loss
from dlmi.metrics import lcs_ratio
from dlmi.targets import Target


@dataclass(frozen=True)
class Evaluation:
    """A discrete prompt, what the LM says to it, and how close that is to the target.

    Attributes:
        step: Optimisation steps before this evaluation.
        prompt_ids: The discrete prompt.
        output_ids: Its greedy decode, as long as the target; of examples, one after the other.
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


def say(lm: FrozenLM, ids: Sequence[int], length: int, prompt_bos: bool) -> tuple[int, ...]:
    """The greedy decode of one whole prompt, alone; nothing after a prompt of no tokens."""
    if not ids:
        return ()
    prefix = lm.prefix([lm.bos_id]) if prompt_bos else None
    output_ids = lm.greedy(torch.tensor([list(ids)], device=lm.device), length, prefix)
    return tuple(output_ids[0].tolist())


def pasted_lcs(lm: FrozenLM, prompt_ids: Sequence[int], target: Target, prompt_bos: bool) -> float:
    """Honest LCS of a prompt whose text is pasted, with what is around it; 0 for no tokens."""
    ratios = []
    for example in target.readings:
        ids = lm.encode(lm.decode(example.frame.full_ids(prompt_ids)))
        ratios.append(lcs_ratio(example.ids, say(lm, ids, len(example.ids), prompt_bos)))
    return sum(ratios) / len(ratios)


def decoded_tokens(target: Target, output_ids: Sequence[int]) -> int:
    """Tokens that the free run had to read beyond the teacher-forced pass before it."""
    tokens = 0
    for example, said_ids in zip(target.readings, target.split(output_ids), strict=True):
        pairs = zip(example.ids, said_ids, strict=True)
        length = len(example.ids)
        right = next((i for i, (wanted, got) in enumerate(pairs) if wanted != got), length)
        tokens += max(0, length - 1 - right)
    return tokens


def mean_lcs(target: Target, output_ids: Sequence[int]) -> float:
    """Honest LCS ratio of a target, averaged over its examples."""
    pairs = zip(target.readings, target.split(output_ids), strict=True)
    ratios = [lcs_ratio(example.ids, said_ids) for example, said_ids in pairs]
    return sum(ratios) / len(ratios)


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
    examples = [example for target in targets for example in target.readings]
    owners = [row for row, target in enumerate(targets) for _ in target.readings]
    read = iter(read_examples(lm, prompt_ids[owners], examples, prompt_bos))
    evaluations = []
    for row, target in enumerate(targets):
        mine = [next(read) for _ in target.readings]
        output_ids = tuple(token_id for said_ids, _ in mine for token_id in said_ids)
        evaluations.append(
            Evaluation(
                step=steps[row],
                prompt_ids=tuple(prompt_ids[row].tolist()),
                output_ids=output_ids,
                lcs=mean_lcs(target, output_ids),
                discrete_loss=sum(loss for _, loss in mine) / len(mine),
            )
        )
    return evaluations


def read_alone(
    lm: FrozenLM, prompt_ids: Sequence[int], target: Target, prompt_bos: bool
) -> tuple[tuple[int, ...], float]:
    """What the LM says to one prompt, and the loss: each example on its own, without others."""
    ids = torch.tensor([list(prompt_ids)], device=lm.device)
    read = [read_examples(lm, ids, [example], prompt_bos)[0] for example in target.readings]
    output_ids = tuple(token_id for said_ids, _ in read for token_id in said_ids)
    return output_ids, sum(loss for _, loss in read) / len(read)


@torch.no_grad()
def read_examples(
    lm: FrozenLM, prompt_ids: Tensor, examples: Sequence[Example], prompt_bos: bool
) -> list[tuple[tuple[int, ...], float]]:
    """What the LM says to prompts in their frames, and how likely it finds the targets.

    Args:
        lm: The model.
        prompt_ids: (R, N).
        examples: R of them.
        prompt_bos: Put BoS before each.

    Returns:
        Of each, the greedy decode and the teacher-forced cross-entropy of the target.
    """
    layout = lay_out(lm, examples, prompt_ids.shape[1], prompt_bos)
    losses: list[float] = []
    outputs: list[list[int]] = []

    def work(rows: slice) -> None:
        logits, output_ids = layout.forced_and_greedy(lm, lm.embed(prompt_ids[rows]), rows)
        target_ids, mask = layout.target_ids[rows], layout.mask[rows]
        losses.extend(target_loss("cross_entropy", logits, target_ids, mask).tolist())
        outputs.extend(output_ids.tolist())

    lm.rows_per_pass.run(lm, len(examples), layout.tokens, layout.target_ids.shape[1], work)
    rows = zip(examples, outputs, losses, strict=True)
    return [(tuple(ids[: len(example.ids)]), loss) for example, ids, loss in rows]
