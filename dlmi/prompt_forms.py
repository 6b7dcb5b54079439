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
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.estimators import EstimatorName, PromptSampler
from dlmi.evaluation import mean_lcs
from dlmi.frames import Example
from dlmi.layouts import lay_out
from dlmi.lm import FrozenLM
from dlmi.reasoning import complete_examples, ids_with_reasoning
from dlmi.slots import Slot
from dlmi.soft_embedding import sample_columns, soft_embedding
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

# Form of the prompt -> decode -> LCS ratio.
LCSMatrix = dict[str, dict[str, float]]

HARD_SAMPLES = 8
BEST_OF_SAMPLES = f"best_of_{HARD_SAMPLES}_samples"
DECODES = ("free_greedy", "teacher_forced")
FLOORS = ("no_prompt", "random_prompt", "copy_prompt")
FORMS = ("best_so_far", "argmax", "softmax", "gumbel_sample", BEST_OF_SAMPLES, *FLOORS)


@dataclass(frozen=True)
class Relaxation:
    """The distributions over tokens that a slot stands for.

    Attributes:
        logits: (N, V).
        tau: (N,).
        estimator: How the method draws relaxed samples; None if it adds no Gumbel noise.
    """

    logits: Tensor
    tau: Tensor
    estimator: EstimatorName | None = None

    def hard_columns(self, count: int, seed: int) -> Tensor:
        """Discrete prompts as the method would draw them, (count, N).

        The largest entry of a Gumbel sample does not depend on tau, that of a plain softmax does.
        """
        logits = self.logits if self.estimator else self.logits / self.tau[:, None]
        return sample_columns(logits, count, seed)


@torch.no_grad()
def measure_forms(
    vocabulary: Vocabulary,
    slot: Slot,
    best_ids: Tensor,
    last_ids: Tensor,
    relaxation: Relaxation | None,
    prompt_bos: bool,
) -> tuple[LCSMatrix, float | None]:
    """The matrix of a slot as it stands, and the rate of rank-1 tokens of its target.

    Args:
        vocabulary: The LM, and what its prompts may hold.
        slot: Whose target it is.
        best_ids: Its best discrete prompt, (N,).
        last_ids: Its latest one, (N,).
        relaxation: Its distributions; forms that need them are left out where there are none.
        prompt_bos: Put BoS before each prompt.

    Returns:
        The matrix; and the share of target tokens that the LM puts first after BoS (in a template:
        after its fixed tokens) and the true tokens before them, which teacher forcing gets right
        with no prompt at all. None where the LM has no BoS.
    """
    lm, target = vocabulary.lm, slot.target
    discrete = {
        "best_so_far": best_ids[None],
        "argmax": last_ids[None],
        "random_prompt": _random_ids(vocabulary, len(best_ids), slot)[None],
        "copy_prompt": _copied_ids(target.ids, best_ids)[None],
    }
    relaxed: dict[str, Tensor] = {}
    if relaxation is not None:
        columns = relaxation.hard_columns(HARD_SAMPLES, _seed(slot))
        discrete[BEST_OF_SAMPLES] = vocabulary.ids(columns)
        relaxed = _relaxed_prompts(vocabulary, relaxation, slot)
    prompts = {form: lm.embed(ids) for form, ids in discrete.items()} | relaxed
    reasoned = [discrete.get(form, last_ids[None]) for form in prompts]
    outputs = _decode(
        lm, torch.cat(list(prompts.values())), torch.cat(reasoned), target, prompt_bos
    )
    matrix: LCSMatrix = {}
    for form, embeds in prompts.items():
        mine, outputs = outputs[: len(embeds)], outputs[len(embeds) :]
        matrix[form] = {
            decode: max(mean_lcs(target, row[column]) for row in mine)
            for column, decode in enumerate(DECODES)
        }
    rank_one_rate = None
    said = _without_prompt(lm, target, prompt_bos)
    if said is not None:
        greedy_ids, forced_ids = said
        matrix["no_prompt"] = {
            "free_greedy": mean_lcs(target, greedy_ids),
            "teacher_forced": mean_lcs(target, forced_ids),
        }
        hits = [wanted == got for wanted, got in zip(target.ids, forced_ids, strict=True)]
        rank_one_rate = sum(hits) / len(hits)
    return {form: matrix[form] for form in FORMS if form in matrix}, rank_one_rate


def _relaxed_prompts(
    vocabulary: Vocabulary, relaxation: Relaxation, slot: Slot
) -> dict[str, Tensor]:
    """Forms that are mixtures of tokens, each (1, N, d) in the LM's dtype."""
    matrix, logits, tau = vocabulary.matrix, [relaxation.logits], relaxation.tau[None]
    prompts = {"softmax": soft_embedding(logits, tau, matrix)[0]}
    if relaxation.estimator is not None:
        sampler = PromptSampler(relaxation.estimator, num_samples=1)
        prompts["gumbel_sample"] = sampler(logits, tau, matrix, [_seed(slot)])[0]
    return {form: embeds.to(vocabulary.lm.dtype) for form, embeds in prompts.items()}


def _seed(slot: Slot) -> int:
    return slot.noise_seed("forms of the prompt")


def _random_ids(vocabulary: Vocabulary, length: int, slot: Slot) -> Tensor:
    generator = torch.Generator().manual_seed(slot.noise_key)
    allowed = vocabulary.allowed_columns(slot.target)
    picks = torch.randint(len(allowed), (length,), generator=generator)
    return vocabulary.ids(allowed[picks.to(allowed.device)])


def _copied_ids(target_ids: Sequence[int], like: Tensor) -> Tensor:
    """The end of the target repeated for ever, as long as another prompt."""
    copies = -(-len(like) // len(target_ids))
    return like.new_tensor([*target_ids] * copies)[-len(like) :]


def _without_prompt(
    lm: FrozenLM, target: Target, prompt_bos: bool
) -> tuple[list[int], list[int]] | None:
    """What the LM says where the slots are empty; None where there is then nothing to read."""
    said: list[tuple[list[int], list[int]]] = []
    for example in target.readings:
        ids = example.frame.fixed_ids
        if not ids or prompt_bos:
            try:
                ids = (lm.bos_id, *ids)
            except InputError:  # the LM has neither BoS nor EoS
                return None
        ids = ids_with_reasoning(lm, ids, example.frame.reasoning)
        prompt_ids = torch.tensor([ids], device=lm.device)
        alone = Target(example.id, example.ids, example.text)
        said += _decode(lm, lm.embed(prompt_ids), prompt_ids, alone, prompt_bos=False)
    greedy_ids, forced_ids = ([i for ids in part for i in ids] for part in zip(*said, strict=True))
    return greedy_ids, forced_ids


def _decode(
    lm: FrozenLM, embeds: Tensor, reasoned_ids: Tensor, target: Target, prompt_bos: bool
) -> list[tuple[list[int], list[int]]]:
    """What the LM says to each prompt under each of `DECODES`: (R, N, d) to R pairs.

    Where it reasons before, it does so after discrete prompts, (R, N).
    """
    readings: list[Example] = [example for _ in embeds for example in target.readings]
    owners = [row for row in range(len(embeds)) for _ in target.readings]
    examples = complete_examples(lm, reasoned_ids[owners].tolist(), readings, prompt_bos)
    layout = lay_out(lm, examples, embeds.shape[1], prompt_bos)
    outputs: list[tuple[list[int], list[int]]] = [([], []) for _ in embeds]

    def work(rows: slice) -> None:
        logits, greedy_ids = layout.forced_and_greedy(lm, embeds[owners[rows]], rows)
        forced_ids = logits.argmax(-1)
        for place, example in enumerate(examples[rows]):
            mine, length = outputs[owners[rows][place]], len(example.ids)
            mine[0].extend(greedy_ids[place, :length].tolist())
            mine[1].extend(forced_ids[place, :length].tolist())

    lm.rows_per_pass.run(lm, len(examples), layout.tokens, layout.target_ids.shape[1], work)
    return outputs
