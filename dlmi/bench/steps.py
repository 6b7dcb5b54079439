"""The time of an optimisation step, against its floor and against a textbook implementation.

The floor is the LM's forward and backward pass on the same rows, with the head on the target
positions, and the two products with E, in the same process. The textbook implementation runs in its
own process, as a script would. All three alternate between the steps of one run of Lightning.
"""

import statistics
from collections.abc import Callable
from concurrent.futures import Executor

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dlmi.bench.textbook import begin_textbook, measure_textbook
from dlmi.bench.timing import StepClock, peak_of, seconds_of
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.products import plain_products, product
from dlmi.methods import DLMI
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.quiet import run_quietly
from dlmi.targets.target import Target

SHAPES = ((10, 20, 8), (80, 20, 8), (80, 20, 1))  # N, M, S
_WARM_UP = 3


def time_steps(
    lm: FrozenLM, textbook: Executor, shape: tuple[int, int, int], repeats: int, flops: float
) -> dict[str, float]:
    """Time the three, in turn, at a shape (N, M, S); `flops` is that of a matrix product.

    Peaks are memory allocated in a step, without Z, its gradient and its moments.
    """
    length, target_length, samples = shape
    target_ids = random_ids(lm, 1, target_length)
    floor = Floor(lm, length, samples, target_ids)
    textbook.submit(begin_textbook, length, samples, target_ids.tolist()).result()
    others: list[tuple[list[float], Callable[[], float]]] = [
        ([], lambda: textbook.submit(measure_textbook, seconds_of).result()),
        ([], lambda: seconds_of(floor.step, lm.device)),
    ]
    (textbook_times, _), (floor_times, _) = others

    def time_others() -> None:
        others.reverse()  # so that neither always runs after the same other
        for times, measure in others:
            times.append(measure())

    clock, steps = StepClock(lm.device, _WARM_UP, time_others), _WARM_UP + repeats
    # As a user runs it, but without evaluations between the steps.
    run = Inverter(DLMI(num_samples=samples), length, steps=steps, eval_every=steps)
    target = Target.single("bench", tuple(target_ids[0].tolist()), "")
    run_quietly(run, TargetDataModule.of(lm, [target], batch_size=1), [clock])
    seconds, floor_seconds, slow_seconds = map(
        statistics.median, (clock.seconds, floor_times, textbook_times)
    )
    floor_peak = peak_of(floor.lm_pass, lm.device)
    return {
        "prompt_length": length,
        "target_length": target_length,
        "samples": samples,
        "repeats": repeats,
        "seconds": seconds,
        "floor_seconds": floor_seconds,
        "textbook_seconds": slow_seconds,
        "peak_bytes": clock.peak_bytes,
        "floor_peak_bytes": floor_peak,  # of the LM's pass
        "textbook_peak_bytes": textbook.submit(measure_textbook, peak_of).result(),
        "token_passes_per_second": clock.token_passes / repeats / seconds,
        "matmul_share": floor.operations() / seconds / flops,
        "step / floor": seconds / floor_seconds,
        "textbook / step": slow_seconds / seconds,
        "extra peak MB": (clock.peak_bytes - floor_peak) / 1e6,
        "steps per second": 1 / seconds,
    }


class Floor:
    """The least work of a step with S samples of N tokens and a target (1, M)."""

    def __init__(self, lm: FrozenLM, length: int, samples: int, target_ids: Tensor) -> None:
        self.lm = lm
        self.target_ids = target_ids.expand(samples, -1)
        self.embeds = lm.embed(random_ids(lm, samples, length)).clone()
        self.matrix = lm.embed(lm.prompt_token_ids.to(lm.device)).float()
        rows, columns = samples * length, len(self.matrix)
        self.weights = torch.rand(rows, columns, device=lm.device)
        self.gradient = torch.rand(rows, self.matrix.shape[1], device=lm.device)

    def lm_pass(self) -> None:
        """Forward and backward to the embeddings."""
        embeds = self.embeds.requires_grad_()
        logits = self.lm.target_logits(embeds, self.target_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), self.target_ids.flatten())
        torch.autograd.grad(loss, embeds)

    def step(self) -> None:
        """The pass and the two products."""
        self.lm_pass()
        product(self.weights, self.matrix)
        product(self.gradient, self.matrix.T)

    def operations(self) -> int:
        """Floating-point operations of the matrix products in a step, attention included."""
        plain = plain_products()  # packed ones are not counted
        with plain, FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.step()
        return int(counter.get_total_flops())


def random_ids(lm: FrozenLM, rows: int, length: int) -> Tensor:
    """Prompts or targets, (rows, length), the same each time."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(len(lm.prompt_token_ids), (rows, length), generator=generator)
    return lm.prompt_token_ids[columns].to(lm.device)
