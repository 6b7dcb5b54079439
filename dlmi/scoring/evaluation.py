"""Evaluations: discrete prompts, decoded greedily.

They alone decide which prompt is the best so far and when a target is solved. The decode is free,
and EoS does not end it. A prompt that several examples share is read with each of them: its LCS and
its loss are the means.

Axes: R prompts, N prompt tokens, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.transfer import HOST, Parcel, moved
from dlmi.metrics import lcs_ratio
from dlmi.scoring.batch import Batch, plain_rows
from dlmi.scoring.losses import leads, token_losses
from dlmi.scoring.prefixes import PrefixStore
from dlmi.scoring.reasoning import tokens_to_write, write_reasoning
from dlmi.targets.context import Context, Example, common_beginning
from dlmi.targets.target import Target, split


@dataclass(frozen=True)
class Evaluation:
    """A discrete prompt, what the LM says after it, and how close that is to the target."""

    step: int  # optimisation steps before this evaluation
    prompt_ids: tuple[int, ...]  # the discrete prompt
    output_ids: tuple[int, ...]  # its greedy decode, as long as the target, in all examples
    lcs: float  # honest LCS ratio
    discrete_loss: float  # teacher-forced cross-entropy of the target after the discrete prompt
    # The smallest gap between the logits of a target token and of its best rival under teacher
    # forcing; above 0 where all tokens are right
    margin: float
    forced_ids: tuple[int, ...]  # what teacher forcing decodes after it
    is_alone: bool  # whether it was decoded with no batch mates
    loss: float | None = None  # training loss of the last step, on the relaxed prompt, if any
    # LCS of that prompt under the training decode (what the authors' public code logs)
    as_in_code_lcs: float | None = None
    is_eligible: bool = True  # others are the best only where no eligible one is known
    reasoning_ids: tuple[tuple[int, ...], ...] = ()  # what the LM wrote first in each example

    @property
    def score(self) -> tuple[bool, float, float]:
        """Order of prompts: eligible ones first, by honest LCS, then by low cross-entropy."""
        return self.is_eligible, self.lcs, -self.discrete_loss


@dataclass(frozen=True)
class ExampleReading:
    """The decodes of one prompt in one example; see `Evaluation`."""

    output_ids: tuple[int, ...]  # the greedy decode
    forced_ids: tuple[int, ...]  # what teacher forcing decodes
    loss: float  # teacher-forced cross-entropy of the target
    margin: float  # of the target's tokens, under teacher forcing
    reasoning_ids: tuple[int, ...] = ()  # what the LM wrote first


def mean_lcs(examples: Sequence[Example], output_ids: Sequence[int]) -> float:
    """LCS ratio of concatenated outputs, averaged over the examples."""
    pairs = zip(examples, split(examples, output_ids), strict=True)
    ratios = [lcs_ratio(example.ids, said_ids) for example, said_ids in pairs]
    return sum(ratios) / len(ratios)


@torch.no_grad()
def read_examples(
    lm: FrozenLM,
    prompts: Tensor,
    examples: Sequence[Example],
    store: PrefixStore | None = None,
    reasoned_ids: Tensor | None = None,
) -> list[ExampleReading]:
    """What the LM says after prompts in R examples, and how likely it finds the targets.

    Prompts are token ids, (R, N), or embeddings, (R, N, d). Where the LM reasons, it does so after
    them, or, for embeddings, after `reasoned_ids`, (R, N).
    """
    is_soft = prompts.is_floating_point()
    written: list[tuple[int, ...]] = [()] * len(examples)
    if any(example.context.reasoning for example in examples):
        ids = reasoned_ids if is_soft else prompts
        assert ids is not None
        written = write_reasoning(lm, ids.tolist(), examples)
    done = [example.after(ids) for example, ids in zip(examples, written, strict=True)]
    size = prompts.shape[1]
    batch = Batch([plain_rows(size, [example], lm.can_share) for example in done], lm.device)
    store, parcel = store or PrefixStore(lm, size=len(batch.groups)), Parcel(lm.device)
    batch.send(parcel)
    arrived = parcel.add(prompts)
    known = dict.fromkeys(row.prefix_ids for row in batch.rows if row.start)
    store.read(list(known), parcel)  # all that are new, together
    [prompts] = arrived()
    inputs = batch.gather(lm, (prompts if is_soft else lm.embed(prompts)).flatten(0, 1))
    read: dict[int, tuple[Tensor, ...]] = {}  # by the first of some rows

    def work(rows: slice) -> None:
        first, prefix = batch.rows[rows.start], batch.prefix(rows, store)
        embeds = inputs[batch.tokens(rows)].view(-1, first.length, inputs.shape[-1])
        target_ids = batch.on_device.target_ids[batch.targets(rows)].view(-1, first.keep)
        prompt_embeds = embeds[:, : first.length - first.keep + 1]
        logits, greedy_ids = lm.forced_and_greedy(prompt_embeds, target_ids, prefix)
        losses = token_losses("cross_entropy", logits, target_ids).mean(-1)
        margins = leads(logits, target_ids).amin(-1)
        read[rows.start] = (greedy_ids, logits.argmax(-1), losses, margins)

    batch.run(lm, work)
    on_host = iter(moved([column for columns in read.values() for column in columns], HOST))
    found: dict[int, ExampleReading] = {}
    for first in read:
        values = zip(*(next(on_host).tolist() for _ in read[first]), strict=True)
        for i, (greedy, forced, loss, margin) in zip(batch.owners[first:], values, strict=False):
            found[i] = ExampleReading(tuple(greedy), tuple(forced), loss, margin, written[i])
    return [found[i] for i in range(len(examples))]


def read_targets(
    lm: FrozenLM,
    prompts: Tensor,
    targets: Sequence[Target],
    store: PrefixStore | None = None,
    reasoned_ids: Tensor | None = None,
) -> list[list[ExampleReading]]:
    """Each prompt in all measured examples of its target, side by side; as `read_examples`."""
    owners = [row for row, target in enumerate(targets) for _ in target.measured]
    examples = [example for target in targets for example in target.measured]
    reasoned_ids = None if reasoned_ids is None else reasoned_ids[owners]
    read = iter(read_examples(lm, prompts[owners], examples, store, reasoned_ids))
    return [[next(read) for _ in target.measured] for target in targets]


def evaluate(
    lm: FrozenLM,
    prompt_ids: Tensor,
    targets: Sequence[Target],
    steps: Sequence[int],
    store: PrefixStore | None = None,
) -> list[Evaluation]:
    """Decode discrete prompts, (R, N), greedily, side by side, at their steps.

    A batch rounds differently from a prompt on its own, and only the latter solves a target: a
    prompt whose output is exact is decoded again, alone.
    """
    read = read_targets(lm, prompt_ids, targets, store)
    is_alone = len(targets) == len(targets[0].measured) == 1
    evaluations = []
    for own, ids, target, step in zip(read, prompt_ids.tolist(), targets, steps, strict=True):
        made = _evaluation(own, ids, target, step, is_alone)
        if made.lcs == 1 and not is_alone:
            made = evaluate_alone(lm, ids, target, step, store)
        evaluations.append(made)
    return evaluations


def evaluate_alone(
    lm: FrozenLM,
    prompt_ids: Sequence[int],
    target: Target,
    step: int,
    store: PrefixStore | None = None,
) -> Evaluation:
    """One prompt with no batch mates: each example on its own."""
    ids = torch.tensor([list(prompt_ids)])
    read = [read_examples(lm, ids, [example], store)[0] for example in target.measured]
    return _evaluation(read, prompt_ids, target, step, is_alone=True)


def decoded_alone(lm: FrozenLM, evaluation: Evaluation, target: Target) -> Evaluation:
    """The evaluation with its prompt decoded alone: again, unless it was."""
    if evaluation.is_alone:
        return evaluation
    alone = evaluate_alone(lm, evaluation.prompt_ids, target, evaluation.step)
    kept = ("loss", "as_in_code_lcs", "is_eligible")
    return replace(alone, **{name: getattr(evaluation, name) for name in kept})


def _evaluation(
    read: Sequence[ExampleReading],
    prompt_ids: Sequence[int],
    target: Target,
    step: int,
    is_alone: bool,
) -> Evaluation:
    output_ids = tuple(token_id for reading in read for token_id in reading.output_ids)
    reasoning_ids = tuple(reading.reasoning_ids for reading in read) if target.reasons else ()
    return Evaluation(
        step=step,
        prompt_ids=tuple(prompt_ids),
        output_ids=output_ids,
        lcs=mean_lcs(target.measured, output_ids),
        discrete_loss=sum(reading.loss for reading in read) / len(read),
        margin=min(reading.margin for reading in read),
        forced_ids=tuple(token_id for reading in read for token_id in reading.forced_ids),
        is_alone=is_alone,
        reasoning_ids=reasoning_ids,
    )


# ---- cost


def tokens_evaluated(evaluation: Evaluation, target: Target, can_share: bool = True) -> int:
    """Tokens that an evaluation has read: the forced pass, the free run, reasoning before them.

    Where the LM can share keys and values, the free run goes on from the first mistake of the
    forced pass; else it reads everything again.
    """
    length = len(evaluation.prompt_ids)
    written = evaluation.reasoning_ids or [()] * len(target.measured)
    tokens = 0
    parts = split(target.measured, evaluation.output_ids)
    for example, ids, said_ids in zip(target.measured, written, parts, strict=True):
        forced = example.after(ids).tokens_read(length)
        tokens += tokens_to_write(example, ids, length) + forced
        left = len(example.ids) - 1 - len(common_beginning([example.ids, said_ids]))
        if left > 0:
            tokens += left if can_share else len(example.context.prefix_ids) + forced
    return tokens


def most_tokens_evaluated(target: Target, prompt_length: int, can_share: bool = True) -> int:
    """An upper bound of `tokens_evaluated`, known before; prefixes are counted as well."""
    tokens = 0
    for example in target.measured:
        context = example.context
        forced = len(context.start_ids) + context.most_tokens + prompt_length + len(example.ids) - 1
        tokens += forced + (len(example.ids) - 1 if can_share else forced)
        if context.reasoning is not None:
            tokens += len(context.ids([0] * prompt_length)) + context.reasoning.max_tokens
    return tokens


# ---- a prompt as text


def decode_text(
    lm: FrozenLM, context: Context, text_ids: Sequence[int], length: int
) -> tuple[int, ...]:
    """The greedy decode after the text of a context, given as ids; () if it has none."""
    if not text_ids:
        return ()
    ids = [*context.start_ids, *text_ids]
    if context.reasoning is not None:
        [written] = lm.generate([ids], context.reasoning.max_tokens)
        ids += [*written, *lm.encode(context.reasoning.trigger)]
    return tuple(lm.greedy(torch.tensor([ids], device=lm.device), length)[0].tolist())


def pasted_lcs(lm: FrozenLM, evaluation: Evaluation, target: Target) -> float:
    """Honest LCS of an evaluated prompt whose text is pasted, with its context; 0 for no tokens."""
    ratios = []
    examples = target.measured
    for example, said_ids in zip(examples, split(examples, evaluation.output_ids), strict=True):
        own_ids = example.context.text_ids(evaluation.prompt_ids)
        text_ids = tuple(lm.encode(lm.decode(own_ids)))
        if text_ids != own_ids:
            said_ids = decode_text(lm, example.context, text_ids, len(example.ids))
        ratios.append(lcs_ratio(example.ids, said_ids))
    return sum(ratios) / len(ratios)
