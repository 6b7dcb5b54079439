"""The data module: it owns the frozen LM and the targets to be inverted on it."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from dlmi.errors import InputError, check_at_least_one
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.loading import PACKAGED, load_lm
from dlmi.lm.memory import RowsPerPass, RowsSetting
from dlmi.lm.placement import DeviceMap, DType, Quantization
from dlmi.run.workers.workers import Workers
from dlmi.targets.sources import ByRank, Sharing, TargetSource
from dlmi.targets.target import Target, share_prefix
from dlmi.targets.template import Messages, find_template


@dataclass(frozen=True)
class LoadOptions:
    """Rare ways to load an LM.

    Args:
        quantization: Keep the LM's linear layers in 8 bits (`int8`) or 4 (`int4`, NF4); needs the
            package bitsandbytes. A checkpoint that is quantised already needs no setting.
        device_map: Spread one LM over several devices, driven by one process
            (`--trainer.devices 1`): `auto` and `balanced` fill all devices alike, `sequential` one
            after the other, `balanced_low_0` leaves room on the first; or a mapping from modules
            to devices, `cpu` or `disk`.
        bos: Token (text or id) that stands before a text, in place of the tokenizer's own.
        trust_remote_code: Let a hub model run code that it brings along.
    """

    quantization: Quantization | None = None
    device_map: DeviceMap | None = None
    bos: str | int | None = None
    trust_remote_code: bool = False


class TargetDataModule(LightningDataModule):
    """The language model and the targets.

    Args:
        lm: The language model: `smollm2-135m-instruct` (packaged), a hub id, a folder, or a GGUF
            file.
        dtype: What the LM computes in and, unless quantised, is kept in; `auto` is float32 on the
            CPU and the checkpoint's own elsewhere.
        load: Rare ways to load it.
        batch_size: Slots: how many targets are inverted side by side.
        rows_per_pass: Prompts that go through the LM at once: a number, or `auto` for what fits
            into the free memory. Bounds the memory, changes nothing else.
        compile: Compile the LM's pass; worth it in long runs alone.
        targets: What the LM is to say: generated (ByRank), of a File, Texts, or Questions.
        template: Fixed text around the prompt, such as "{question} Hint:{slot} Answer:". Learned
            tokens go into `{slot}`, exactly 5 of them into `{slot:5}`; other names are fields of a
            target's line in a JSONL file. Or a chat: a list of messages, each with a `role` and a
            `content`.
        chat: Make the template (by default the prompt alone) the user's message of a chat, as the
            tokenizer's own chat template writes it.
        share: Learn one prompt for all targets, which then are examples of one task, instead of
            one prompt for each.
    """

    def __init__(
        self,
        lm: str = PACKAGED,
        dtype: DType = "auto",
        load: LoadOptions = LoadOptions(),  # noqa: B008  # it is frozen
        batch_size: int = 5,
        rows_per_pass: RowsSetting = "auto",
        compile: bool = False,
        targets: TargetSource = ByRank(),  # noqa: B008  # it is frozen
        template: str | Messages | None = None,
        chat: bool = False,
        share: Sharing | None = None,
    ) -> None:
        super().__init__()
        check_at_least_one("data", batch_size=batch_size)
        self.template = find_template(template, chat)
        targets.check_template(self.template)
        self.save_hyperparameters(ignore=["load", "targets", "share"])
        self.lm_name = lm
        self.dtype: DType = dtype
        self.load_options = load
        self.batch_size = batch_size
        self.rows_per_pass = RowsPerPass(rows_per_pass)
        self.compile = compile
        self.source = targets
        self.share = share
        self.targets: list[Target] = []  # in order; there after `setup`
        self._lm: FrozenLM | None = None

    @classmethod
    def of(cls, lm: FrozenLM, targets: Sequence[Target], **options: Any) -> "TargetDataModule":
        """From an LM and targets; `options` are `batch_size` and others of the constructor."""
        data = cls(lm=lm.name, **options)
        data._take(lm, list(targets))
        return data

    @property
    def lm(self) -> FrozenLM:
        """The frozen LM; there after `setup`."""
        if self._lm is None:
            raise RuntimeError("The LM is loaded by `setup` (or `load`), which has not run yet.")
        return self._lm

    def load(self, device: torch.device | str = "cpu") -> None:
        """Load the LM and make the targets, once."""
        if self._lm is not None:
            return
        load = self.load_options
        options = (load.bos, load.trust_remote_code, load.device_map, load.quantization)
        lm = load_lm(self.lm_name, self.dtype, device, *options)
        targets = self.source.targets(lm, self.template)
        if self.share is not None:
            targets = [self.share.target(lm, targets, self.template)]
        self._take(lm, targets)

    def _take(self, lm: FrozenLM, targets: list[Target]) -> None:
        for target_id, times in Counter(target.id for target in targets).most_common(1):
            if times > 1:
                raise InputError(f"Expected target ids to be unique, but {target_id!r} came twice.")
        if lm.is_spread and self.compile:
            raise InputError(
                "Expected `data.compile` to be false for an LM that is spread by "
                "`data.load.device_map`, but it is true: hooks break the graph at each layer."
            )
        lm.compile_passes = self.compile
        lm.rows_per_pass = self.rows_per_pass
        self._lm, self.targets = lm, share_prefix(targets)

    def share_targets(self, workers: Workers) -> None:
        """Take worker 0's targets: drawn by rank, they could differ between kinds of devices."""
        shared = workers.broadcast([target.to_json() for target in self.targets])
        if workers.index:
            self.targets = share_prefix([Target.from_json(target) for target in shared])

    def setup(self, stage: str) -> None:
        """Load onto this worker's device."""
        self.load(self.trainer.strategy.root_device if self.trainer else "cpu")

    def train_dataloader(self) -> "itertools.count[int]":
        """Endless: the slots hold the data, and a batch is one step of all slots."""
        return itertools.count()
