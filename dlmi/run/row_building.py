"""The result row of a slot whose target has ended."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.methods.base import Method
from dlmi.methods.slot import Slot
from dlmi.metrics import lcs_ratio, overlap_ratio, target_hit_ratio
from dlmi.rows import ExampleResult, Inversion
from dlmi.scoring.evaluation import Evaluation, decoded_alone, evaluate_alone, pasted_lcs
from dlmi.scoring.prompt_forms import LCSMatrix, measure_forms
from dlmi.targets.context import Example
from dlmi.targets.target import Target, split

# Measures of the best prompt, decoded alone, by name: they fill `row.metrics`.
METRICS: dict[str, Callable[[FrozenLM, Target, Evaluation], float | None]] = {
    "lcs": lambda lm, target, best: best.lcs,
    "discrete_loss": lambda lm, target, best: best.discrete_loss,
    "margin": lambda lm, target, best: best.margin,
    "round_trip_lcs": lambda lm, target, best: pasted_lcs(lm, best, target),
    "prompt_perplexity": lambda lm, target, best: lm.perplexity(best.prompt_ids),
    "overlap_ratio": lambda lm, target, best: overlap_ratio(best.prompt_ids, target.ids),
    "target_hit_ratio": lambda lm, target, best: target_hit_ratio(best.prompt_ids, target.ids),
}
# Those that are columns of a row as well.
_COLUMNS = ("round_trip_lcs", "prompt_perplexity", "overlap_ratio", "target_hit_ratio")


def build_row(
    slot: Slot,
    stop_reason: str,
    method: Method[Any],
    settings: dict[str, Any],
    environment: dict[str, Any],
    with_forms: bool,
) -> Inversion:
    """The row of a slot: its best prompt, decoded alone, and its measures.

    `environment` holds the columns that say where it was measured, and on which targets. The LCS
    matrix and held-out examples are measured `with_forms` alone.
    """
    lm, target, last = slot.tokens.lm, slot.target, slot.last
    assert slot.best is not None
    assert last is not None
    best = decoded_alone(lm, slot.best, target)
    prompt_ids = best.prompt_ids
    metrics = {name: metric(lm, target, best) for name, metric in METRICS.items()}
    matrix: LCSMatrix = {}
    rank_one_rate = None
    held_out: tuple[ExampleResult, ...] = ()
    if with_forms:
        matrix, rank_one_rate = measure_forms(
            slot.tokens,
            [best, last],
            method.prompt_ids(slot, slot.state),
            method.soft_prompt(slot, slot.state),
            slot.seed("forms of the prompt"),
            slot.key,
        )
        if target.held_out:
            others = dataclasses.replace(
                target, examples=target.held_out, held_out=(), evaluated=None
            )
            tried = evaluate_alone(lm, prompt_ids, others, best.step)
            held_out = _results(lm, others.examples, tried)
    context = target.measured[0].context
    is_bare = target.is_shared or not (context.fixed_ids or context.template)
    full_ids = () if is_bare else context.text_ids(prompt_ids)
    return Inversion(
        target_id=target.id,
        k=target.k,
        target_text=target.text,
        target_ids=target.ids,
        prompt_text=lm.decode(prompt_ids),
        prompt_ids=prompt_ids,
        output_text=lm.decode(best.output_ids),
        output_ids=best.output_ids,
        lcs=best.lcs,
        as_in_code_lcs=last.as_in_code_lcs,
        exact=best.output_ids == target.ids,
        round_trips=slot.tokens.round_trips(prompt_ids),
        **{name: metrics[name] for name in _COLUMNS},  # type: ignore[arg-type]
        loss=best.loss,
        discrete_loss=best.discrete_loss,
        best_step=best.step,
        steps=slot.step,
        stop_reason=stop_reason,
        failure=slot.failure,
        seconds=slot.seconds,
        forward_tokens=slot.cost.forward,
        backward_tokens=slot.cost.backward,
        seed=settings["seed"],
        method=type(method).__name__,
        settings=settings,
        trace=tuple(slot.trace),
        prompt_tokens=_token_texts(lm, prompt_ids),
        target_tokens=_token_texts(lm, target.ids),
        output_tokens=_token_texts(lm, best.output_ids),
        lcs_matrix=matrix,
        rank_one_rate=rank_one_rate,
        diagnostics={name: tuple(v.tolist()) for name, v in slot.diagnostics.items()},
        context=None if is_bare else context,
        full_ids=full_ids,
        full_text=lm.decode(full_ids) if full_ids else "",
        examples=_results(lm, target.measured, best) if target.is_shared else (),
        held_out=held_out,
        metrics=metrics,
        **environment,
    )


def _token_texts(lm: FrozenLM, ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(lm.decode([token_id]) for token_id in ids)


def _results(
    lm: FrozenLM, examples: Sequence[Example], evaluation: Evaluation
) -> tuple[ExampleResult, ...]:
    """The result of a prompt on each example."""
    written = evaluation.reasoning_ids or ((),) * len(examples)
    said = split(examples, evaluation.output_ids)
    return tuple(
        ExampleResult(
            **vars(example),
            full_text=lm.decode(example.context.text_ids(evaluation.prompt_ids)),
            output_ids=said_ids,
            output_text=lm.decode(said_ids),
            lcs=lcs_ratio(example.ids, said_ids),
            exact=said_ids == example.ids,
            reasoning_ids=before,
            reasoning_text=lm.decode(before) if before else "",
        )
        for example, said_ids, before in zip(examples, said, written, strict=True)
    )
