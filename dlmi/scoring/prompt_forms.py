"""The LCS matrix: every form that a prompt can take, under both decodes.

An LCS says little unless it says of which prompt and under which decode. The headline is a discrete
prompt under a free greedy decode (`best_so_far`, `free_greedy`). The DLMI authors' public code logs
a Gumbel sample under teacher forcing, which can be far higher and is no prompt that one could type.
Beside them stand the floors: what comes of no prompt, of random tokens, and of the target itself
repeated.

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

The decodes are `free_greedy`, where the LM reads its own tokens, and `teacher_forced`, where it
reads the target's. Of a prompt that examples share, each LCS is their mean. Where the LM reasons
before it answers, it does so after each discrete form; a relaxed one is no text to reason about and
is read with what the LM writes after the `argmax`. These measurements are not charged to the
target: they do not help to find it.

Axes: R prompts, N prompt tokens, M target tokens, V tokens a prompt may hold, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.scoring.evaluation import mean_lcs, read_examples, reasoned
from dlmi.targets.context import NO_CONTEXT, Example
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
    best_ids: Tensor,
    last_ids: Tensor,
    soft_prompt: SoftPrompt | None,
    seed: int,
    key: int,
) -> tuple[LCSMatrix, float | None]:
    """The matrix of a target, and the rate of rank-1 tokens in it.

    Args:
        tokens: The target, and what its prompt may hold.
        best_ids: Its best discrete prompt, (N,).
        last_ids: Its latest one, (N,).
        soft_prompt: Its distributions; forms that need them are left out where there are none.
        seed: Of the samples.
        key: Seed of the random prompt.

    Returns:
        The matrix; and the share of target tokens that the LM puts first after BoS (in a template:
        after its fixed tokens) and the true tokens before them, which teacher forcing gets right
        with no prompt at all. None where the LM has no BoS.
    """
    lm, target = tokens.lm, tokens.target
    best_ids, last_ids = best_ids.to(lm.device), last_ids.to(lm.device)
    random_ids = tokens.random_ids(1, len(best_ids), torch.Generator().manual_seed(key))
    discrete = {
        "best_so_far": best_ids[None],
        "argmax": last_ids[None],
        "random_prompt": random_ids.to(lm.device),
        "copy_prompt": _copied_ids(target.ids, best_ids)[None],
    }
    relaxed: dict[str, Tensor] = {}
    if soft_prompt is not None:
        discrete[BEST_OF_SAMPLES] = tokens.ids(soft_prompt.hard_columns(HARD_SAMPLES, seed))
        relaxed = _relaxed_prompts(tokens, soft_prompt, seed)
    prompts = {form: lm.embed(ids) for form, ids in discrete.items()} | relaxed
    reasoned = [discrete.get(form, last_ids[None]) for form in prompts]
    outputs = _decode(lm, torch.cat(list(prompts.values())), torch.cat(reasoned), target)
    matrix: LCSMatrix = {}
    for form, embeds in prompts.items():
        mine, outputs = outputs[: len(embeds)], outputs[len(embeds) :]
        matrix[form] = {
            decode: max(mean_lcs(target.measured, row[column]) for row in mine)
            for column, decode in enumerate(DECODES)
        }
    rank_one_rate = None
    said = _without_prompt(lm, target)
    if said is not None:
        greedy_ids, forced_ids = said
        matrix["no_prompt"] = {
            "free_greedy": mean_lcs(target.measured, greedy_ids),
            "teacher_forced": mean_lcs(target.measured, forced_ids),
        }
        hits = [wanted == got for wanted, got in zip(target.ids, forced_ids, strict=True)]
        rank_one_rate = sum(hits) / len(hits)
    return {form: matrix[form] for form in FORMS if form in matrix}, rank_one_rate


def _relaxed_prompts(tokens: TargetTokens, prompt: SoftPrompt, seed: int) -> dict[str, Tensor]:
    """Forms that are mixtures of tokens, each (1, N, d) in the LM's dtype."""
    forms = {"softmax": SoftPrompt(prompt.logits, prompt.tau)}
    if prompt.estimator is not None:
        draws = prompt.rao_draws
        forms["gumbel_sample"] = SoftPrompt(
            prompt.logits, prompt.tau, prompt.estimator, 1, seed, draws
        )
    made = soft_embeds(list(forms.values()), tokens.vocabulary.matrix)
    return dict(zip(forms, (embeds.to(tokens.lm.dtype) for embeds in made), strict=True))


def _copied_ids(target_ids: Sequence[int], like: Tensor) -> Tensor:
    """The end of the target repeated for ever, as long as another prompt."""
    copies = -(-len(like) // len(target_ids))
    return like.new_tensor([*target_ids] * copies)[-len(like) :]


def _without_prompt(lm: FrozenLM, target: Target) -> tuple[list[int], list[int]] | None:
    """What the LM says where the blanks are empty; None where there is then nothing to read."""
    greedy_ids: list[int] = []
    forced_ids: list[int] = []
    for example in target.measured:
        context = example.context
        ids = (*context.start_ids, *context.fixed_ids)
        if not ids:
            try:
                ids = (lm.bos_id,)
            except InputError:  # the LM has neither BoS nor EoS
                return None
        whole_ids = torch.tensor([reasoned(lm, ids, context.reasoning)], device=lm.device)
        alone = Example(example.id, example.ids, example.text, NO_CONTEXT)
        [read] = read_examples(lm, whole_ids, [alone])
        greedy_ids += read.output_ids
        forced_ids += read.forced_ids
    return greedy_ids, forced_ids


def _decode(
    lm: FrozenLM, embeds: Tensor, reasoned_ids: Tensor, target: Target
) -> list[tuple[list[int], list[int]]]:
    """What the LM says after each prompt under each of `DECODES`: (R, N, d) to R pairs."""
    owners = [row for row in range(len(embeds)) for _ in target.measured]
    examples = [example for _ in embeds for example in target.measured]
    read = read_examples(lm, embeds[owners], examples, reasoned_ids=reasoned_ids[owners])
    outputs: list[tuple[list[int], list[int]]] = [([], []) for _ in embeds]
    for owner, reading in zip(owners, read, strict=True):
        outputs[owner][0].extend(reading.output_ids)
        outputs[owner][1].extend(reading.forced_ids)
    return outputs
