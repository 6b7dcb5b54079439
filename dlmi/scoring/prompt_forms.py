"""The LCS matrix: every form that a prompt can take, under both decodes.

An LCS means little without its prompt and its decode. The headline is a discrete prompt under a
free greedy decode (`best_so_far`, `free_greedy`). The DLMI authors' public code logs a Gumbel
sample under teacher forcing, which can be far higher and is no prompt that one could type. The
floors are no prompt, random tokens, and the target itself repeated.

========================  ====================================================================
form                      prompt
========================  ====================================================================
`best_so_far`             the best discrete prompt of the whole run of the target
`argmax`                  the discrete prompt of the last step
`softmax`                 softmax(Z / tau) E of the last step, without noise
`gumbel_sample`           one sample of the last step, as the method trains on it
`best_of_8_samples`       eight discrete prompts drawn from the last step's distribution; the best
                          LCS of each decode
`no_prompt`               BoS alone; in a template, its fixed tokens alone
`random_prompt`           N random tokens of those that a prompt may hold
`copy_prompt`             the target over and over, its end last
========================  ====================================================================

In `free_greedy` decodes the LM reads its own tokens, in `teacher_forced` ones the target's. The LCS
of a prompt that examples share is their mean. Where the LM reasons before it answers, it does so
after each discrete form; relaxed forms are read with what it writes after the `argmax`. The target
is not charged for these measurements.

Axes: N prompt tokens, d width.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.scoring.evaluation import (
    Evaluation,
    ExampleReading,
    mean_lcs,
    read_examples,
    read_targets,
)
from dlmi.targets.context import Context
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import TargetTokens

# Form of the prompt -> decode -> LCS ratio.
LCSMatrix = dict[str, dict[str, float]]

HARD_SAMPLES = 8
BEST_OF_SAMPLES = f"best_of_{HARD_SAMPLES}_samples"
DECODES = ("free_greedy", "teacher_forced")
FLOORS = ("no_prompt", "random_prompt", "copy_prompt")
FORMS = ("best_so_far", "argmax", "softmax", "gumbel_sample", BEST_OF_SAMPLES, *FLOORS)


@torch.no_grad()
def measure_forms(
    tokens: TargetTokens,
    known: Sequence[Evaluation],
    last_ids: Tensor,
    soft_prompt: SoftPrompt | None,
    seed: int,
    key: int,
) -> tuple[LCSMatrix, float | None]:
    """The matrix of a target, and the rate of rank-1 tokens in it.

    From evaluations that were made of its prompts, the best first, its latest discrete prompt,
    (N,), its distributions (without them, the forms that need them are left out), and the seeds of
    samples and of the random prompt. The rate is the share of target tokens that teacher forcing
    gets right with no prompt at all; None where the LM has no BoS.
    """
    lm, target, best = tokens.lm, tokens.target, known[0]
    last_ids = last_ids.to(lm.device)
    random_ids = tokens.random_ids(1, len(last_ids), torch.Generator().manual_seed(key))
    copies = -(-len(last_ids) // len(target.ids))
    discrete = {
        "random_prompt": random_ids.to(lm.device),
        "copy_prompt": last_ids.new_tensor([target.ids * copies])[:, -len(last_ids) :],
    }
    latest = tuple(last_ids.tolist())
    evaluated = {"best_so_far": best}
    if (last := next((one for one in known if one.prompt_ids == latest), None)) is not None:
        evaluated["argmax"] = last
    else:
        discrete["argmax"] = last_ids[None]
    relaxed: dict[str, SoftPrompt] = {}
    if soft_prompt is not None:
        discrete[BEST_OF_SAMPLES] = tokens.ids(soft_prompt.hard_columns(HARD_SAMPLES, seed))
        relaxed["softmax"] = replace(soft_prompt, estimator=None)
        if soft_prompt.estimator is not None:
            relaxed["gumbel_sample"] = replace(soft_prompt, samples=1, seed=seed)
    made = soft_embeds(list(relaxed.values()), tokens.vocabulary.matrix)
    prompts = {form: lm.embed(ids) for form, ids in discrete.items()}
    prompts |= {form: own.to(lm.dtype) for form, own in zip(relaxed, made, strict=True)}
    reasoned_ids = torch.cat([discrete.get(form, last_ids[None]) for form in prompts])
    embeds = torch.cat(list(prompts.values()))
    read = iter(read_targets(lm, embeds, [target] * len(embeds), reasoned_ids=reasoned_ids))
    readings = {form: [next(read) for _ in own] for form, own in prompts.items()}
    rank_one_rate = None
    without = _read_without_prompt(lm, target)
    if without is not None:
        readings["no_prompt"] = [without]
        forced_ids = [token_id for reading in without for token_id in reading.forced_ids]
        hits = [wanted == got for wanted, got in zip(target.ids, forced_ids, strict=True)]
        rank_one_rate = sum(hits) / len(hits)

    said = {form: [_outputs(own) for own in of_prompts] for form, of_prompts in readings.items()}
    said |= {form: [_outputs([one])] for form, one in evaluated.items()}
    matrix = {
        form: {
            decode: max(mean_lcs(target.measured, output_ids) for output_ids in of_prompts)
            for decode, of_prompts in zip(DECODES, zip(*said[form], strict=True), strict=True)
        }
        for form in FORMS
        if form in said
    }
    return matrix, rank_one_rate


def _outputs(read: Sequence[ExampleReading | Evaluation]) -> tuple[list[int], list[int]]:
    """What the LM says after a prompt in some examples, in each of `DECODES`."""
    return (
        [token_id for reading in read for token_id in reading.output_ids],
        [token_id for reading in read for token_id in reading.forced_ids],
    )


def _read_without_prompt(lm: FrozenLM, target: Target) -> list[ExampleReading] | None:
    """What the LM says where the blanks are empty; None where there is then nothing to read."""
    read = []
    for example in target.measured:
        context = example.context
        ids = (*context.start_ids, *context.fixed_ids)
        if not ids:
            try:
                ids = (lm.bos_id,)
            except InputError:  # the LM has neither BoS nor EoS
                return None
        alone = replace(example, context=Context(reasoning=context.reasoning))
        read += read_examples(lm, torch.tensor([ids], device=lm.device), [alone])
    return read
