"""`python -m dlmi.bench.projection`: the cost model for GPUs that it was never run on.

What a GPU's data sheet says is published; what share of it this program reaches is assumed, and
marked so. It prints the tables of docs/scaling.md.
"""

from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig

from dlmi.bench.cost_model import CostModel, Machine
from dlmi.bench.lm_sizes import Size, Sizes
from dlmi.bench.queue_tail import ideal_seconds, makespan, unequal_steps

_SLOTS = 8
_RESERVED = 0.1  # of a GPU's memory, for the allocator and the kernels
# Assumed: bytes that noise and softmax move per entry, with the Triton kernels.
_ENTRY_BYTES = (16, 24)
# Measured, but on a CPU that does the work itself: what a layer and a step cost the host. A GPU
# works meanwhile, so a step takes the longer of the two.
_HOST_LAYER, _HOST_STEP = 0.63e-3, 3.3e-3


@dataclass(frozen=True)
class DataSheet:
    """What a GPU's maker says.

    Attributes:
        flops: Dense, in bfloat16 on its matrix units.
        flops_float32: Without them.
        bandwidth: Of its memory, bytes per second.
        memory: Bytes.
    """

    flops: float
    flops_float32: float
    bandwidth: float
    memory: float

    def machine(self, share: float) -> Machine:
        """With an assumed share of the published operations, and 0.8 of the bandwidth."""
        bandwidth = 0.8 * self.bandwidth
        return Machine(
            flops=share * self.flops,
            flops_float32=share * self.flops_float32,
            attention_flops=share * self.flops / 2,
            weight_bandwidth=bandwidth,
            bandwidth=bandwidth,
            entry_seconds=(_ENTRY_BYTES[0] / bandwidth, _ENTRY_BYTES[1] / bandwidth),
            layer_seconds=(0.0, 0.0),
            step_seconds=0.0,
            slot_seconds=0.0,
        )


L40S = DataSheet(362e12, 91.6e12, 864e9, 48e9)
SHARES = (0.25, 0.4, 0.6)  # assumed: low, middle, high
LMS = {
    "SmolLM3-3B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=11008,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        tie_word_embeddings=False,
    ),
}
SETTINGS = ((Size(80, 20, 8), 2048), (Size(20, 8, 8), 512), (Size(20, 8, 2), 512))


def gpu_step_seconds(lm: Sizes, size: Size, share: float, sheet: DataSheet = L40S) -> float:
    """The longer of what the GPU takes and what its host takes."""
    device = CostModel(lm, sheet.machine(share)).step_seconds(size)
    return max(device, lm.layers * _HOST_LAYER + _HOST_STEP)


def slots_that_fit(lm: Sizes, size: Size, one_pass: bool, sheet: DataSheet = L40S) -> int:
    """Slots with all their rows in one pass, or with passes cut to the rows of one slot."""
    free = (1 - _RESERVED) * sheet.memory - lm.lm_bytes
    rows = lm.step_bytes(replace(size, slots=1))
    state = lm.slot_bytes(size)
    return max(0, int(free / (state + rows)) if one_pass else int((free - rows) / state))


def targets_per_hour(lm: Sizes, size: Size, steps: int, share: float) -> float:
    """Of one GPU whose slots are always filled; evaluations every 16 steps and rows included."""
    costs = CostModel(lm, L40S.machine(share))
    seconds = steps * gpu_step_seconds(lm, size, share)
    # A decoding step is over before its host has asked for the next.
    decoding = (size.M - 1) * lm.layers * _HOST_LAYER / 3
    seconds += steps / 16 * (costs.evaluation_seconds(size.slots, size) + decoding)
    seconds += size.slots * (costs.report_seconds(size) + 4 * decoding)
    return 3600 * size.slots / seconds


def _print_gpu_table() -> None:
    print(
        "| LM | N, M, S, steps | weights | state per slot | pass per slot | slots: one pass, cut |"
        " step | targets per hour: 1 GPU | 8 | 64 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, config in LMS.items():
        lm = Sizes.of_config(config, torch.bfloat16)
        for one, steps in SETTINGS:
            slots = min(_SLOTS, slots_that_fit(lm, one, one_pass=True))
            size = replace(one, slots=slots)
            fit = [slots_that_fit(lm, one, one_pass) for one_pass in (True, False)]
            seconds = [gpu_step_seconds(lm, size, share) for share in reversed(SHARES)]
            rates = [targets_per_hour(lm, size, steps, share) for share in SHARES]
            cells = [
                name,
                f"{one.N}, {one.M}, {one.S}, {steps}",
                f"{lm.lm_bytes / 1e9:.1f} GB",
                f"{lm.slot_bytes(one) / 1e6:.0f} MB",
                f"{lm.step_bytes(one) / 1e9:.2f} GB",
                f"{fit[0]}, {fit[1]}",
                f"{seconds[1]:.2f} s ({seconds[0]:.2f} to {seconds[2]:.2f}), {slots} slots",
                *(
                    f"{gpus * rates[1]:.0f} ({gpus * rates[0]:.0f} to {gpus * rates[2]:.0f})"
                    for gpus in (1, 8, 64)
                ),
            ]
            print("| " + " | ".join(cells) + " |")


def _print_parts_table() -> None:
    lm = Sizes.of_config(LMS["SmolLM3-3B"], torch.bfloat16)
    parts = CostModel(lm, L40S.machine(SHARES[1])).step_parts(Size(80, 20, 8, slots=8))
    total = sum(parts.values())
    print(", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items()))


def _print_tail_table() -> None:
    lm = Sizes.of_config(LMS["SmolLM3-3B"], torch.bfloat16)

    def step_seconds(slots: int) -> float:
        return gpu_step_seconds(lm, Size(80, 20, 8, slots=slots), SHARES[1])

    print("| targets | 8 GPUs x 8 slots | 64 GPUs x 8 slots | 64 GPUs x 1 slot |")
    print("|---|---|---|---|")
    for targets in (64, 125, 512, 1000, 10000):
        efficiencies = []
        for ranks, slots in ((8, 8), (64, 8), (64, 1)):
            shares = []
            for seed in range(5):
                steps = unequal_steps(targets, 2048, seed=seed)
                # What the targets take where nothing idles, at the speed of filled slots.
                best = ideal_seconds(steps, ranks, slots, step_seconds)
                shares.append(best / makespan(steps, ranks, slots, step_seconds))
            efficiencies.append(f"{sum(shares) / len(shares):.0%}")
        print(f"| {targets} | " + " | ".join(efficiencies) + " |")


if __name__ == "__main__":
    _print_gpu_table()
    print()
    _print_parts_table()
    print()
    _print_tail_table()
