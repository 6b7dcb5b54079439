"""Checks of relations between model, data and trainer that no single argument shows."""

from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer

from dlmi.data import TargetDataModule
from dlmi.errors import InputError
from dlmi.strategy import TargetParallelStrategy

if TYPE_CHECKING:
    from dlmi.inverter import Inverter


def check_run(trainer: Trainer, data: TargetDataModule, module: "Inverter") -> None:
    """Raise `InputError` for what would couple the slots, lose Z's gradient or not fit the LM.

    Args:
        trainer: The trainer, as it is set up.
        data: With its LM and targets loaded.
        module: The method.
    """
    if trainer.world_size > 1 and data.lm_device_map is not None:
        raise InputError(
            "Expected `trainer.devices` to be 1 with `data.lm_device_map`, but the run has "
            f"{trainer.world_size} ranks: each would spread its LM over the same devices."
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, TargetParallelStrategy):
        raise InputError(
            f"Expected `trainer.strategy` to be TargetParallelStrategy on {trainer.world_size} "
            f"ranks, but got {type(trainer.strategy).__name__}, which makes the prompts of all "
            "ranks equal. Leave `trainer.strategy` out and it is chosen."
        )
    if trainer.gradient_clip_val:
        raise InputError(
            f"Expected `trainer.gradient_clip_val` to be unset, but got "
            f"{trainer.gradient_clip_val}: one norm over all slots would couple the targets."
        )
    if trainer.accumulate_grad_batches != 1:
        raise InputError(
            "Expected `trainer.accumulate_grad_batches` to be 1, but got "
            f"{trainer.accumulate_grad_batches}. Raise `model.num_samples` instead."
        )
    check_precision(trainer.precision)
    _check_mixed(trainer, data)
    vocabulary = module.vocabulary_of(data.lm)
    vocabulary.check_targets(data.targets)
    module.check_vocabulary(vocabulary, data.targets)
    module.fluency_term_of(vocabulary)  # refuses an LM that it does not fit
    _check_lengths(data, module)


def _check_lengths(data: TargetDataModule, module: "Inverter") -> None:
    """Slots must hold the prompt, and the LM's positions the whole."""
    prompt_length = module.prompt_length + module.prompt_bos
    for target in data.targets:
        if target.shared is not None and not module.can_share_prompts:
            raise InputError(
                "Expected `data.shared` to be false with `model.refine_after` below 1 and with "
                "EchoSearch, whose swaps are compared on one target, but it is true. Choose "
                "another method, such as GCG."
            )
        for example in target.all_readings:
            example.frame.sizes(module.prompt_length)
            if module.prompt_bos and example.frame.fixed_ids[:1] == (data.lm.bos_id,):
                raise InputError(
                    "Expected `model.prompt_bos` to be false with a template that starts with BoS "
                    f"already, but it is true (target {target.id}). Leave it out."
                )
            if module.fluency and example.frame.fixed_ids:
                raise InputError(
                    "Expected `model.fluency` to be 0 with `data.template` or `data.chat`, but got "
                    f"{module.fluency}: the penalty knows prompts that stand alone. Leave it out."
                )
    longest = max(data.targets, key=lambda target: target.longest_row(0))
    limit, rest = data.lm.max_positions, longest.longest_row(0)
    if limit is not None and prompt_length + rest > limit:
        has_frame = any(example.frame.fixed_ids for example in longest.all_readings)
        what = "template + target length" if has_frame else "target length"
        raise InputError(
            f"Expected `model.prompt_length` + {what} to be at most {limit} (the positions "
            f"of {data.lm.name}), but got {prompt_length} + {rest} (target {longest.id}). Shorten "
            "one of them."
        )


def check_precision(precision: str | int | None) -> None:
    """Raise `InputError` unless a `trainer.precision` leaves Z in float32.

    Args:
        precision: As the user or as Lightning writes it.
    """
    if precision in ("16-true", "bf16-true"):
        raise InputError(
            f"Expected `trainer.precision` to keep Z in float32, but got {precision}: "
            "Z's gradients would vanish. For a smaller LM set `data.dtype` instead."
        )
    if precision not in (None, 32, "32", "32-true", 16, "16", "16-mixed", "bf16", "bf16-mixed"):
        raise InputError(
            "Expected `trainer.precision` to be 32-true, bf16-mixed or 16-mixed, but got "
            f"{precision}. The LM's own dtype is `data.dtype`; Z follows it to float64."
        )


def _check_mixed(trainer: Trainer, data: TargetDataModule) -> None:
    """Autocast narrows float32: other LMs it would leave as they are, or round twice."""
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(trainer.precision))
    if mixed is not None and data.lm.dtype not in (torch.float32, mixed):
        raise InputError(
            f"Expected `data.dtype` to be float32 with `trainer.precision` {trainer.precision}, "
            f"but the LM is {data.lm.dtype_name}. Leave one of the two out."
        )
