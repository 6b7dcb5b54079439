"""A slot: the place in the batch where one target is being inverted."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlmi.evaluation import Evaluation
from dlmi.targets import Target


@dataclass
class Slot:
    """One target in flight.

    Its tensors (Z, Phi) live in the inverter, under the slot's index; its Adam moments live in the
    optimiser. Everything else that its future depends on is here.

    Attributes:
        index: Which of the inverter's parameters are its own.
        target: What it inverts.
        generator: Its own noise, seeded from the run's seed and the target's id.
        step: Optimisation steps taken.
        seconds: Wall time spent in the slot.
        best: The best evaluation so far.
        last: The latest evaluation.
        trace: (step, LCS, discrete loss, seconds) of each evaluation.
        loss: Training loss of the latest step, ().
        output_ids: What the latest training pass decoded, (M,).
        memory: What else a method keeps per target between steps.
    """

    index: int
    target: Target
    generator: torch.Generator
    step: int = 0
    seconds: float = 0.0
    best: Evaluation | None = None
    last: Evaluation | None = None
    trace: list[tuple[int, float, float, float]] = field(default_factory=list)
    loss: Tensor | None = None
    output_ids: Tensor | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, index: int, target: Target, seed: int, device: torch.device) -> "Slot":
        """A fresh slot; its noise depends on the seed and the target alone."""
        digest = hashlib.blake2b(f"{seed}/{target.id}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(digest, "big") >> 1)  # seeds are signed
        return cls(index, target, generator)

    def is_due(self, eval_every: int, budget: int) -> bool:
        """Whether the prompt is to be decoded now: at the start, on the beat, and at the end."""
        if self.last is not None and self.last.step == self.step:
            return False
        return self.step % eval_every == 0 or self.step >= budget

    def record(self, evaluation: Evaluation) -> None:
        """Keep an evaluation, and the best of them all."""
        self.last = evaluation
        if evaluation.beats(self.best):
            self.best = evaluation
        point = (evaluation.step, evaluation.lcs, evaluation.discrete_loss, self.seconds)
        self.trace.append(point)

    def stop_reason(self, budget: int) -> str | None:
        """`solved`, `budget`, or None while it is to go on."""
        if self.last is not None and self.last.output_ids == self.target.ids:
            return "solved"
        return "budget" if self.step >= budget else None

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that a checkpoint can hold with `weights_only=True`."""
        return {
            "index": self.index,
            "target_id": self.target.id,
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "best": dataclasses.asdict(self.best) if self.best else None,
            "last": dataclasses.asdict(self.last) if self.last else None,
            "trace": list(self.trace),
            "loss": self.loss,
            "output_ids": self.output_ids,
            "memory": dict(self.memory),
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], targets: dict[str, Target], device: torch.device
    ) -> "Slot":
        """The inverse of `state`."""
        generator = torch.Generator(device=device)
        generator.set_state(state["generator"].cpu())
        return cls(
            index=state["index"],
            target=targets[state["target_id"]],
            generator=generator,
            step=state["step"],
            seconds=state["seconds"],
            best=_evaluation(state["best"]),
            last=_evaluation(state["last"]),
            trace=[tuple(point) for point in state["trace"]],
            loss=_to(state["loss"], device),
            output_ids=_to(state["output_ids"], device),
            memory=state["memory"],
        )


def _evaluation(state: dict[str, Any] | None) -> Evaluation | None:
    return None if state is None else Evaluation(**state)


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
