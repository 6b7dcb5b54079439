"""Checks of model, data and trainer against each other."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from dlmi.errors import InputError, check_positive
from dlmi.lm.norm_gradients import NormGradientScale
from dlmi.methods.base import Method
from dlmi.run.data import TargetDataModule
from dlmi.run.workers.strategy import TargetParallelStrategy
from dlmi.targets.target import Target
from dlmi.tokens.token_sets import AllowedTokens, check_allowed_tokens
from dlmi.tokens.vocabulary import Vocabulary


def check_trainer(trainer: Trainer, data: TargetDataModule) -> None:
    """Raise `InputError` for what would couple the slots or lose Z's gradient."""
    check_workers(trainer, data)
    if trainer.gradient_clip_val:
        raise InputError(
            f"Expected `trainer.gradient_clip_val` to be unset, but got "
            f"{trainer.gradient_clip_val}: one norm over all slots would couple the targets."
        )
    if trainer.accumulate_grad_batches != 1:
        raise InputError(
            "Expected `trainer.accumulate_grad_batches` to be 1, but got "
            f"{trainer.accumulate_grad_batches}. Raise `model.method.num_samples` instead."
        )
    check_precision(trainer.precision)
    # Autocast narrows float32: other LMs it would leave as they are, or round twice.
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(trainer.precision))
    if mixed is not None and data.lm.dtype not in (torch.float32, mixed):
        raise InputError(
            f"Expected `data.dtype` to be float32 with `trainer.precision` {trainer.precision}, "
            f"but the LM is {data.lm.dtype_name}. Leave one of the two out."
        )


def check_targets(
    targets: Sequence[Target],
    method: Method[Any],
    vocabulary: Vocabulary,
    prompt_length: int,
    fluency: float,
) -> None:
    """Raise `InputError` for targets that do not fit the method, its prompts or the LM."""
    vocabulary.check_targets(targets)
    method.check(vocabulary, prompt_length, targets)
    if fluency and method.reads_embeddings:
        raise InputError(
            f"Expected `model.fluency` to be 0 with {type(method).__name__}, which reads "
            f"embeddings that are no distribution over tokens, but got {fluency}."
        )
    for target in targets:
        for context in (example.context for example in target.all_examples):
            context.sizes(prompt_length)
            if fluency and context.fixed_ids:
                raise InputError(
                    "Expected `model.fluency` to be 0 with `data.template` or `data.chat`, but got "
                    f"{fluency}: the penalty is defined for a prompt that stands alone."
                )
            if context.start_ids and context.fixed_ids[:1] == context.start_ids:
                raise InputError(
                    "Expected `model.prompt_bos` to be false with a template that starts with BoS "
                    f"already, but it is true (target {target.id}). Leave it out."
                )
    longest = max(targets, key=lambda target: target.longest_row(0))  # BoS counts
    limit, rest = vocabulary.lm.max_positions, longest.longest_row(0)
    if limit is not None and prompt_length + rest > limit:
        has_context = any(example.context.fixed_ids for example in longest.all_examples)
        what = "template + target length" if has_context else "target length"
        raise InputError(
            f"Expected `model.prompt_length` + {what} to be at most {limit} (the positions of "
            f"{vocabulary.lm.name}), but got {prompt_length} + {rest} (target {longest.id}). "
            "Shorten one of them."
        )


def check_workers(trainer: Trainer, data: TargetDataModule) -> None:
    """Raise `InputError` for workers that would not be independent; needs no LM."""
    if trainer.world_size > 1 and data.load_options.device_map is not None:
        raise InputError(
            "Expected `trainer.devices` to be 1 with `data.load.device_map`, but the run has "
            f"{trainer.world_size} workers: each would spread its LM over the same devices."
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, TargetParallelStrategy):
        raise InputError(
            f"Expected `trainer.strategy` to be TargetParallelStrategy with {trainer.world_size} "
            f"workers, but got {type(trainer.strategy).__name__}, which makes the prompts of all "
            "workers equal. Leave `trainer.strategy` out and it is chosen."
        )


def check_settings(
    prompt_length: int,
    fluency: float,
    norm_gradient_scale: NormGradientScale | None,
    allowed_tokens: AllowedTokens | None,
) -> None:
    """Raise `InputError` for arguments of an inverter that make no sense."""
    if allowed_tokens is not None:
        check_allowed_tokens(allowed_tokens)
    if isinstance(norm_gradient_scale, float | int):
        check_positive("model", norm_gradient_scale=norm_gradient_scale)
    if not 0 <= fluency < float("inf"):
        raise InputError(f"Expected `model.fluency` to be at least 0, but got {fluency}.")
    if fluency and prompt_length < 2:
        raise InputError(
            f"Expected `model.prompt_length` to be at least 2 with `model.fluency`, but got "
            f"{prompt_length}: what is measured is how each token follows those before it."
        )


def check_precision(precision: str | int | None) -> None:
    """Raise `InputError` unless a precision, as user or Lightning write it, keeps Z in float32."""
    if precision not in (None, 32, "32", "32-true", 16, "16", "16-mixed", "bf16", "bf16-mixed"):
        raise InputError(
            "Expected `trainer.precision` to be 32-true, bf16-mixed or 16-mixed, which keep Z in "
            f"float32, but got {precision}. The LM's own dtype is `data.dtype`; Z follows it to "
            "float64."
        )
