"""A slot: the place in the batch where one target is being inverted."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlmi.evaluation import Evaluation
from dlmi.targets import Target


@dataclass(frozen=True)
class Budget:
    """When a target has had enough.

    Attributes:
        steps: Optimisation steps.
        token_passes: Tokens sent forward or backward through the LM, or None for no limit.
    """

    steps: int
    token_passes: int | None = None

    def share_used(self, slot: "Slot") -> float:
        """Between 0 and 1: the larger share of the two."""
        used = slot.step / self.steps
        if self.token_passes is not None:
            used = max(used, slot.token_passes / self.token_passes)
        return min(used, 1.0)


@dataclass(frozen=True)
class TracePoint:
    """How a target stood at one evaluation.

    Attributes:
        step: Optimisation steps before it.
        lcs: Honest LCS ratio of the discrete prompt of that moment (not the best so far).
        discrete_loss: Teacher-forced cross-entropy of the target after that prompt.
        loss: Training loss of the step before; None at step 0.
        as_in_code_lcs: LCS of the relaxed prompt under the training decode; None at step 0.
        seconds: Wall time spent in the slot so far.
        token_passes: Cost so far.
        means: The method's diagnostics, such as `tau`, averaged over positions.
    """

    step: int
    lcs: float
    discrete_loss: float
    loss: float | None
    as_in_code_lcs: float | None
    seconds: float
    token_passes: int
    means: dict[str, float]


@dataclass
class Slot:
    """One target in flight.

    Its tensors (Z, Phi) live in the inverter, under the slot's index; its Adam moments live in the
    optimiser. Everything else that its future depends on is here.

    Attributes:
        index: Which of the inverter's parameters are its own.
        target: What it inverts.
        generator: Its own random numbers, seeded from the run's seed and the target's id.
        noise_key: The same for noise that is made from counters.
        step: Optimisation steps taken.
        seconds: Wall time spent in the slot.
        forward_tokens: Tokens sent forward through the LM, evaluations included.
        backward_tokens: Tokens sent backward through the LM.
        best: The best evaluation so far.
        last: The latest evaluation.
        trace: One point for each evaluation.
        loss: Training loss of the latest step, ().
        output_ids: What the latest training pass decoded, (M,).
        is_promising: Set by a method that has just seen its discrete prompt succeed: evaluate now.
        failure: Why it cannot go on, such as a loss that is not a number.
        diagnostics: The method's numbers per position, at the latest evaluation.
        reasoned_ids: The discrete prompt that the LM has written its reasoning after.
        reasoning: What it wrote, by the id of the example.
        memory: What else a method keeps per target between steps; plain values and tensors.
    """

    index: int
    target: Target
    generator: torch.Generator
    noise_key: int
    step: int = 0
    seconds: float = 0.0
    forward_tokens: int = 0
    backward_tokens: int = 0
    best: Evaluation | None = None
    last: Evaluation | None = None
    trace: list[TracePoint] = field(default_factory=list)
    loss: Tensor | None = None
    output_ids: Tensor | None = None
    is_promising: bool = False
    failure: str | None = None
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    reasoned_ids: tuple[int, ...] = ()
    reasoning: dict[str, tuple[int, ...]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, index: int, target: Target, seed: int, device: torch.device) -> "Slot":
        """A fresh slot; its noise depends on the seed and the target alone."""
        key = _hash(f"{seed}/{target.id}")
        generator = torch.Generator(device=device)
        generator.manual_seed(key)
        return cls(index, target, generator, key)

    @property
    def token_passes(self) -> int:
        """The cost so far: every token forward counts 1, every token backward counts 1."""
        return self.forward_tokens + self.backward_tokens

    def target_at(self, step: int | None = None) -> Target:
        """The target as a step reads it: with its own few examples where many share the prompt.

        Which ones they are depends on the slot's seed and on the step alone. All examples have
        their turn before any has its next. What the LM has written to them is part of them.

        Args:
            step: Steps taken before it; by default as many as have been.
        """
        target = self._with_examples_of(step)
        if not target.reasons:
            return target
        known = self.reasoning
        return target.with_examples(
            [e.after(known[e.id]) if e.id in known else e for e in target.readings]
        )

    def _with_examples_of(self, step: int | None) -> Target:
        shared = self.target.shared
        if shared is None:
            return self.target
        step = self.step if step is None else step
        size = len(shared.pool)
        count = min(shared.per_step, size)
        chosen = [shared.pool[self._turn(step * count + i, size)] for i in range(count)]
        return self.target.with_examples(chosen)

    def _turn(self, turn: int, size: int) -> int:
        """Which of the examples has a turn; each round has an order of its own."""
        round_number, place = divmod(turn, size)
        seed = _hash(f"{self.noise_key}/round {round_number} of examples")
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        return int(order[place])

    def noise_seed(self, purpose: str = "") -> int:
        """A seed of its own for each step, and for each purpose within it."""
        return _hash(f"{self.noise_key}/{self.step}/{purpose}")

    def is_due(self, eval_every: int, budget: Budget) -> bool:
        """Whether to decode now: at the start, on the beat, at the end, or on a good sign."""
        if self.last is not None and self.last.step == self.step:
            return False
        on_beat = self.step % eval_every == 0
        return on_beat or self.is_promising or self.stop_reason(budget) is not None

    def record(self, evaluation: Evaluation) -> None:
        """Keep an evaluation, and the best of them all."""
        self.last = evaluation
        self.is_promising = False
        if self.best is None or evaluation.score > self.best.score:
            self.best = evaluation
        self.trace.append(
            TracePoint(
                step=evaluation.step,
                lcs=evaluation.lcs,
                discrete_loss=evaluation.discrete_loss,
                loss=evaluation.loss,
                as_in_code_lcs=evaluation.as_in_code_lcs,
                seconds=self.seconds,
                token_passes=self.token_passes,
                means={name: float(v.float().mean()) for name, v in self.diagnostics.items()},
            )
        )

    def stop_reason(self, budget: Budget) -> str | None:
        """`solved`, `failed`, `budget`, or None while it is to go on."""
        best = self.best
        if best is not None and best.is_eligible and best.output_ids == self.target.ids:
            return "solved"
        if self.failure is not None:
            return "failed"
        return "budget" if budget.share_used(self) >= 1 else None

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that a checkpoint can hold with `weights_only=True`."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del state["target"]
        return {
            **state,
            "target_id": self.target.id,
            "generator": self.generator.get_state(),
            "best": dataclasses.asdict(self.best) if self.best else None,
            "last": dataclasses.asdict(self.last) if self.last else None,
            "trace": [dataclasses.asdict(point) for point in self.trace],
            "diagnostics": dict(self.diagnostics),
            "reasoning": dict(self.reasoning),
            "memory": dict(self.memory),
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], targets: dict[str, Target], device: torch.device
    ) -> "Slot":
        """The inverse of `state`."""
        plain = dict(state)
        target = targets[plain.pop("target_id")]
        generator = torch.Generator(device=device)
        generator.set_state(plain.pop("generator").cpu())
        for name in ("best", "last"):
            plain[name] = Evaluation(**plain[name]) if plain[name] else None
        for name in ("loss", "output_ids"):
            plain[name] = _to(plain[name], device)
        plain["trace"] = [TracePoint(**point) for point in plain["trace"]]
        plain["memory"] = {key: _to(value, device) for key, value in plain["memory"].items()}
        return cls(target=target, generator=generator, **plain)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # seeds are signed


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
