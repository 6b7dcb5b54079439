"""The honest measurement: a discrete prompt, really decoded.

An evaluation is all that decides what is best so far and when a target is solved. The prompt is a
row of token ids, the decode is free and greedy, and EoS does not end it. A prompt that several
examples share is read with each of them: its LCS and its loss are the means.

Axes: R prompts, N prompt tokens, M target tokens, V logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.metrics import lcs_ratio
from dlmi.scoring.batch import Batch, rows_of_prompt
from dlmi.scoring.losses import leads, token_losses
from dlmi.scoring.prefixes import PrefixStore
from dlmi.scoring.reasoning import tokens_to_write, write_reasoning
from dlmi.targets.context import Example, Reasoning
from dlmi.targets.target import Target, split


@dataclass(frozen=True)
class Evaluation:
    """A discrete prompt, what the LM says after it, and how close that is to the target."""

    step: int  # optimisation steps before this evaluation
    prompt_ids: tuple[int, ...]  # the discrete prompt
    # Its greedy decode, as long as the target; of several examples, concatenated
    output_ids: tuple[int, ...]
    lcs: float  # honest LCS ratio
    discrete_loss: float  # teacher-forced cross-entropy of the target after the discrete prompt
    # The smallest gap between a target token's logit and its best rival's, under teacher forcing;
    # above 0 where all tokens are right
    margin: float
    # Training loss of the last step before, on the relaxed prompt; None at step 0
    loss: float | None = None
    # LCS of the relaxed prompt under the training decode (what the authors' public code logs); None
    # at step 0
    as_in_code_lcs: float | None = None
    is_eligible: bool = True  # whether it may be the best; if none may, the best of the others is
    # Where the LM reasons before it answers, what it wrote in each example
    reasoning_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def score(self) -> tuple[bool, float, float]:
        """What makes a prompt the best: that it may be, honest LCS, then low cross-entropy."""
        return self.is_eligible, self.lcs, -self.discrete_loss


@dataclass(frozen=True)
class ExampleReading:
    """What came of one prompt in one example."""

    output_ids: tuple[int, ...]  # the greedy decode, as long as what is to be said
    forced_ids: tuple[int, ...]  # what teacher forcing decodes
    loss: float  # teacher-forced cross-entropy of the target
    margin: float  # of the target's tokens, under teacher forcing
    reasoning_ids: tuple[int, ...] = ()  # what the LM wrote before it, where it was to


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
    """What the LM says after prompts in their contexts, and how likely it finds the targets.

    Args:
        lm: The model.
        prompts: Token ids, (R, N), or embeddings, (R, N, d).
        examples: R of them.
        store: Keeps the beginnings of contexts; default: one of its own.
        reasoned_ids: The discrete prompts that the LM reasons after, (R, N), where `prompts` are
            embeddings and examples ask for reasoning.
    """
    is_soft = prompts.is_floating_point()
    written: list[tuple[int, ...]] = [()] * len(examples)
    if any(example.context.reasoning for example in examples):
        ids = reasoned_ids if is_soft else prompts
        assert ids is not None
        written = write_reasoning(lm, ids.tolist(), examples)
    done = [example.after(ids) for example, ids in zip(examples, written, strict=True)]
    size = prompts.shape[1]
    rows = [rows_of_prompt(i, size, [example], lm.can_share)[0] for i, example in enumerate(done)]
    batch = Batch(rows, lm.device)
    store = store or PrefixStore(lm, size=len(batch.groups))
    prompts = prompts.to(lm.device)
    inputs = batch.gather(lm, (prompts if is_soft else lm.embed(prompts)).flatten(0, 1))
    found: dict[int, ExampleReading] = {}
    for group in batch.groups:
        first = batch.rows[group.start]
        length, keep = first.length, len(first.example.ids)
        prefix = batch.prefix(group, store)

        def work(
            cut: slice, start: int = group.start, shape: tuple[int, int] = (length, keep)
        ) -> None:
            rows, (length, keep) = slice(start + cut.start, start + cut.stop), shape
            embeds = inputs[batch.tokens(rows)].view(-1, length, inputs.shape[-1])
            target_ids = batch.target_ids[batch.targets(rows)].view(-1, keep)
            prompt_embeds = embeds[:, : length - keep + 1]
            logits, greedy_ids = lm.forced_and_greedy(prompt_embeds, target_ids, prefix)  # noqa: B023
            losses = token_losses("cross_entropy", logits, target_ids).mean(-1)
            margins = leads(logits, target_ids).amin(-1)
            columns = (greedy_ids, logits.argmax(-1), losses, margins)
            values = zip(batch.rows[rows], *(column.tolist() for column in columns), strict=True)
            for row, greedy, forced, loss, margin in values:
                found[row.prompt] = ExampleReading(
                    tuple(greedy), tuple(forced), loss, margin, written[row.prompt]
                )

        lm.rows_per_pass.run(lm, group.stop - group.start, length, keep, work)
    return [found[i] for i in range(len(examples))]


def evaluate(
    lm: FrozenLM,
    prompt_ids: Tensor,
    targets: Sequence[Target],
    steps: Sequence[int],
    store: PrefixStore | None = None,
) -> list[Evaluation]:
    """Decode discrete prompts greedily, side by side.

    A batch rounds differently from a prompt on its own, and only the latter solves a target: a
    prompt whose output is exact is decoded again, alone.

    Args:
        lm: The model.
        prompt_ids: (R, N).
        targets: R of them.
        steps: Optimisation steps that each prompt has had.
        store: Keeps the beginnings of contexts.
    """
    owners = [row for row, target in enumerate(targets) for _ in target.measured]
    examples = [example for target in targets for example in target.measured]
    read = iter(read_examples(lm, prompt_ids[owners], examples, store))
    evaluations = []
    for ids, target, step in zip(prompt_ids.tolist(), targets, steps, strict=True):
        made = _evaluation([next(read) for _ in target.measured], ids, target, step)
        if made.lcs == 1 and len(examples) > 1:
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
    ids = torch.tensor([list(prompt_ids)], device=lm.device)
    read = [read_examples(lm, ids, [example], store)[0] for example in target.measured]
    return _evaluation(read, prompt_ids, target, step)


def decoded_again(lm: FrozenLM, evaluation: Evaluation, target: Target) -> Evaluation:
    """The same prompt, decoded alone; what the run knows of its step stays."""
    alone = evaluate_alone(lm, evaluation.prompt_ids, target, evaluation.step)
    return replace(
        alone,
        loss=evaluation.loss,
        as_in_code_lcs=evaluation.as_in_code_lcs,
        is_eligible=evaluation.is_eligible,
    )


def _evaluation(
    read: Sequence[ExampleReading], prompt_ids: Sequence[int], target: Target, step: int
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
        reasoning_ids=reasoning_ids,
    )


# ---- cost


def tokens_evaluated(evaluation: Evaluation, target: Target, can_share: bool = True) -> int:
    """Tokens that an evaluation has read: the forced pass, the free run, reasoning before them.

    Args:
        evaluation: It.
        target: What was to be said.
        can_share: Whether the LM's keys and values can be cut: the free run then goes on from the
            first mistake of the forced pass, else it reads everything again.
    """
    length = len(evaluation.prompt_ids)
    written = evaluation.reasoning_ids or [()] * len(target.measured)
    tokens = 0
    parts = split(target.measured, evaluation.output_ids)
    for example, ids, said_ids in zip(target.measured, written, parts, strict=True):
        forced = example.after(ids).tokens_read(length)
        tokens += tokens_to_write(example, ids, length) + forced
        pairs = zip(example.ids, said_ids, strict=True)
        last = len(example.ids) - 1
        right = next((i for i, (wanted, got) in enumerate(pairs) if wanted != got), last)
        if right < last:
            tokens += last - right if can_share else len(example.context.prefix_ids) + forced
    return tokens


def most_tokens_evaluated(target: Target, prompt_length: int, can_share: bool = True) -> int:
    """The same before the evaluation, at most; fixed beginnings are counted as well."""
    tokens = 0
    for example in target.measured:
        context = example.context
        forced = len(context.start_ids) + context.most_tokens + prompt_length + len(example.ids) - 1
        tokens += forced + (len(example.ids) - 1 if can_share else forced)
        if context.reasoning is not None:
            tokens += len(context.ids([0] * prompt_length)) + context.reasoning.max_tokens
    return tokens


# ---- a prompt as text


def reasoned(lm: FrozenLM, ids: Sequence[int], reasoning: Reasoning | None) -> tuple[int, ...]:
    """All of these ids, with what the LM writes after them, and the trigger, where it reasons."""
    if reasoning is None or not ids:
        return tuple(ids)
    [written] = lm.generate([ids], reasoning.max_tokens)
    return (*ids, *written, *lm.encode(reasoning.trigger))


def decode_alone(
    lm: FrozenLM, ids: Sequence[int], length: int, reasoning: Reasoning | None = None
) -> tuple[int, ...]:
    """The greedy decode after all of these ids, reasoning before it; nothing after none."""
    if not ids:
        return ()
    whole_ids = torch.tensor([reasoned(lm, ids, reasoning)], device=lm.device)
    return tuple(lm.greedy(whole_ids, length)[0].tolist())


def pasted_lcs(lm: FrozenLM, prompt_ids: Sequence[int], target: Target) -> float:
    """Honest LCS of a prompt whose text is pasted, with its context; 0 for no tokens."""
    ratios = []
    for example in target.measured:
        context = example.context
        text_ids = lm.encode(lm.decode(context.text_ids(prompt_ids)))
        ids = (*context.start_ids, *text_ids) if text_ids else ()
        said_ids = decode_alone(lm, ids, len(example.ids), context.reasoning)
        ratios.append(lcs_ratio(example.ids, said_ids))
    return sum(ratios) / len(ratios)
