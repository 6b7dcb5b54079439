"""The honest measurement: a discrete prompt, really decoded.

`evaluate_prompts` is all that decides what is best so far and when a target is solved. The prompt
is a row of token ids, the decode is free and greedy, and EoS does not end it. A prompt that several
examples share is read with each of them: its LCS and its loss are the means.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.frames import Example, Reasoning
from dlmi.layouts import lay_out
from dlmi.lm import FrozenLM
from dlmi.losses import target_loss
from dlmi.metrics import lcs_ratio
from dlmi.reasoning import ids_with_reasoning, write_reasoning
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
        reasoning_ids: Where the LM reasons before it answers, what it wrote in each example.
    """

    step: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    lcs: float
    discrete_loss: float
    loss: float | None = None
    as_in_code_lcs: float | None = None
    is_eligible: bool = True
    reasoning_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def score(self) -> tuple[bool, float, float]:
        """What makes a prompt the best: that it may be, honest LCS, then low cross-entropy."""
        return self.is_eligible, self.lcs, -self.discrete_loss


@dataclass(frozen=True)
class Reading:
    """What came of one prompt in one example.

    Attributes:
        output_ids: The greedy decode, as long as what is to be said.
        loss: Teacher-forced cross-entropy of that.
        reasoning_ids: What the LM wrote before it, where it was to.
    """

    output_ids: tuple[int, ...]
    loss: float
    reasoning_ids: tuple[int, ...]


def say(
    lm: FrozenLM,
    ids: Sequence[int],
    length: int,
    prompt_bos: bool,
    reasoning: Reasoning | None = None,
) -> tuple[int, ...]:
    """The greedy decode of one whole prompt, alone; nothing after a prompt of no tokens."""
    if not ids:
        return ()
    if reasoning is not None:
        whole = [lm.bos_id, *ids] if prompt_bos else ids
        ids, prompt_bos = ids_with_reasoning(lm, whole, reasoning), False
    prefix = lm.prefix([lm.bos_id]) if prompt_bos else None
    output_ids = lm.greedy(torch.tensor([list(ids)], device=lm.device), length, prefix)
    return tuple(output_ids[0].tolist())


def pasted_lcs(lm: FrozenLM, prompt_ids: Sequence[int], target: Target, prompt_bos: bool) -> float:
    """Honest LCS of a prompt whose text is pasted, with what is around it; 0 for no tokens."""
    ratios = []
    for example in target.readings:
        ids = lm.encode(lm.decode(example.frame.full_ids(prompt_ids)))
        said_ids = say(lm, ids, len(example.ids), prompt_bos, example.frame.reasoning)
        ratios.append(lcs_ratio(example.ids, said_ids))
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
        output_ids = _one_after_the_other(mine)
        evaluations.append(
            Evaluation(
                step=steps[row],
                prompt_ids=tuple(prompt_ids[row].tolist()),
                output_ids=output_ids,
                lcs=mean_lcs(target, output_ids),
                discrete_loss=sum(reading.loss for reading in mine) / len(mine),
                reasoning_ids=_reasoning_of(mine, target),
            )
        )
    return evaluations


def read_alone(
    lm: FrozenLM, prompt_ids: Sequence[int], target: Target, prompt_bos: bool
) -> tuple[tuple[int, ...], float, tuple[tuple[int, ...], ...]]:
    """What the LM says to one prompt, the loss, and its reasoning: each example on its own."""
    ids = torch.tensor([list(prompt_ids)], device=lm.device)
    read = [read_examples(lm, ids, [example], prompt_bos)[0] for example in target.readings]
    loss = sum(reading.loss for reading in read) / len(read)
    return _one_after_the_other(read), loss, _reasoning_of(read, target)


def _one_after_the_other(read: Sequence[Reading]) -> tuple[int, ...]:
    return tuple(token_id for reading in read for token_id in reading.output_ids)


def _reasoning_of(read: Sequence[Reading], target: Target) -> tuple[tuple[int, ...], ...]:
    return tuple(reading.reasoning_ids for reading in read) if target.reasons else ()


@torch.no_grad()
def read_examples(
    lm: FrozenLM, prompt_ids: Tensor, examples: Sequence[Example], prompt_bos: bool
) -> list[Reading]:
    """What the LM says to prompts in their frames, and how likely it finds the targets.

    Args:
        lm: The model.
        prompt_ids: (R, N).
        examples: R of them.
        prompt_bos: Put BoS before each.

    Returns:
        Of each, the greedy decode and the teacher-forced cross-entropy of the target, both after
        the LM's own reasoning where an example wants it.
    """
    written = write_reasoning(lm, prompt_ids.tolist(), examples, prompt_bos)
    examples = [example.after(ids) for example, ids in zip(examples, written, strict=True)]
    layout = lay_out(lm, examples, prompt_ids.shape[1], prompt_bos)
    losses: list[float] = []
    outputs: list[list[int]] = []

    def work(rows: slice) -> None:
        logits, output_ids = layout.forced_and_greedy(lm, lm.embed(prompt_ids[rows]), rows)
        target_ids, mask = layout.target_ids[rows], layout.mask[rows]
        losses.extend(target_loss("cross_entropy", logits, target_ids, mask).tolist())
        outputs.extend(output_ids.tolist())

    lm.rows_per_pass.run(lm, len(examples), layout.tokens, layout.target_ids.shape[1], work)
    rows = zip(examples, outputs, losses, written, strict=True)
    return [Reading(tuple(ids[: len(e.ids)]), loss, before) for e, ids, loss, before in rows]
