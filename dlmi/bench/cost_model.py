r"""Time and memory of an optimisation step, from the sizes of an LM and the speed of a machine.

A product of r rows with a matrix of w weights takes 2 r w / flops + bytes(w) / weight_bandwidth:
the weights are read once however few the rows are. All other work of the LM reads and writes
activations, at `bandwidth`, and each layer has a price of its own, however small its tensors. The
LM's weights get no gradient, so a backward pass makes as many products as a forward pass; only
attention, which computes its scores anew, makes 5 instead of 2.

The sums over activations are those of a Llama, run op by op.

Axes: N prompt tokens, M target tokens, S samples, V tokens a prompt may hold, slots side by side.
"""

from dataclasses import dataclass

from dlmi.bench.lm_sizes import FLOAT32, Size, Sizes

_ROWS_PER_GROUP = 1024  # of the soft embedding: E is read once per group
# Reads and writes of each target logit (argmax, log-softmax, its backward pass), and of each entry
# of Z (its gradient is cleared and added to; Adam reads four tensors and writes three).
_LOGIT_ACCESSES, _ENTRY_ACCESSES = 7, 11
_HARD_FORMS, _SOFT_FORMS = 12, 2  # prompts of the LCS matrix (`dlmi.prompt_forms`)
_SAMPLED_FORMS = 8  # of the hard ones, drawn from Z


@dataclass(frozen=True)
class Machine:
    """How fast a machine is; none of it is read off the steps that are predicted.

    Attributes:
        flops: Of a large matrix product in the LM's dtype, per second.
        flops_float32: Of one in float32, which the products with E are.
        attention_flops: Of fused attention.
        weight_bandwidth: Bytes of weights that a product takes in, per second.
        bandwidth: Bytes that elementwise work reads and writes, per second.
        entry_seconds: Of one entry of a soft embedding, noise and softmax: forward, backward.
        layer_seconds: Of a layer, however few its tokens: forward, backward.
        step_seconds: Of a step around the LM, whatever its sizes.
        slot_seconds: The same of each slot.
    """

    flops: float
    flops_float32: float
    attention_flops: float
    weight_bandwidth: float
    bandwidth: float
    entry_seconds: tuple[float, float]
    layer_seconds: tuple[float, float]
    step_seconds: float
    slot_seconds: float


@dataclass(frozen=True)
class CostModel:
    """An LM on a machine.

    Attributes:
        lm: Its sizes.
        machine: Its speed.
    """

    lm: Sizes
    machine: Machine

    def step_parts(self, size: Size) -> dict[str, float]:
        """Seconds of one optimisation step of every slot, by where they go."""
        lm, machine = self.lm, self.machine
        columns = size.V or lm.vocabulary
        entries = size.slots * size.N * columns
        logits = size.rows * size.M * lm.vocabulary
        return {
            "LM forward": self.forward_seconds(size.rows, size.tokens, size.M),
            "LM backward": self._backward_seconds(size.rows, size.tokens, size.M),
            "loss": _LOGIT_ACCESSES * FLOAT32 * logits / machine.bandwidth,
            "products with E": 2 * self._embedding_product(size.rows * size.N, columns),
            "noise and softmax": size.S * entries * sum(machine.entry_seconds),
            "Adam": _ENTRY_ACCESSES * FLOAT32 * entries / machine.bandwidth,
            "around": machine.step_seconds + size.slots * machine.slot_seconds,
        }

    def step_seconds(self, size: Size) -> float:
        """One optimisation step of every slot: Gumbel-Softmax or straight-through, Adam."""
        return sum(self.step_parts(size).values())

    def evaluation_seconds(self, rows: int, size: Size) -> float:
        """A teacher-forced pass over discrete prompts, and a free run that is wrong at once."""
        forced = self.forward_seconds(rows, size.tokens, size.M)
        return forced + self._decode_seconds(rows, size.N, size.M - 1)

    def report_seconds(self, size: Size) -> float:
        """The row of a finished target: its prompt decoded again, and the LCS matrix."""
        one_row = self.evaluation_seconds(1, size)
        no_prompt = self.evaluation_seconds(1, Size(1, size.M))
        as_text = self.forward_seconds(1, size.N, 1) + self._decode_seconds(1, size.N, size.M - 1)
        perplexity = self.forward_seconds(1, size.N - 1, size.N - 1)
        columns = size.V or self.lm.vocabulary
        drawn = (_SAMPLED_FORMS + _SOFT_FORMS) * size.N * columns * self.machine.entry_seconds[0]
        products = _SOFT_FORMS * self._embedding_product(size.N, columns)
        forms = self.evaluation_seconds(_HARD_FORMS + _SOFT_FORMS, size)
        return one_row + no_prompt + as_text + perplexity + drawn + products + forms

    def run_seconds(self, size: Size, targets: int, steps: int, eval_every: int) -> float:
        """All targets, none of them solved before its budget is spent."""
        waves = -(-targets // size.slots)
        evaluations = 1 + -(-steps // eval_every)
        per_wave = steps * self.step_seconds(size)
        per_wave += evaluations * self.evaluation_seconds(size.slots, size)
        return waves * per_wave + targets * self.report_seconds(size)

    def forward_seconds(self, rows: int, tokens: int, keep: int, before: int = 0) -> float:
        """A forward pass after `before` tokens that are in a cache."""
        lm, machine = self.lm, self.machine
        return (
            self._products(rows, tokens, keep)
            + lm.attention_operations(rows, tokens, before) / machine.attention_flops
            + self._elementwise(rows * tokens, lm.forward_accesses)
            + lm.layers * machine.layer_seconds[0]
            + 2 * lm.cache_bytes(rows, before) / machine.bandwidth  # the cache grows by copying
        )

    def _backward_seconds(self, rows: int, tokens: int, keep: int) -> float:
        lm, machine = self.lm, self.machine
        return (
            self._products(rows, tokens, keep)
            + 2.5 * lm.attention_operations(rows, tokens) / machine.attention_flops
            + self._elementwise(rows * tokens, lm.backward_accesses)
            + lm.layers * machine.layer_seconds[1]
        )

    def _decode_seconds(self, rows: int, before: int, tokens: int) -> float:
        return sum(self.forward_seconds(rows, 1, 1, before + t) for t in range(tokens))

    def _products(self, rows: int, tokens: int, keep: int) -> float:
        lm, head = self.lm, self.lm.vocabulary * self.lm.width
        operations = lm.pass_operations(rows, tokens, keep) - lm.attention_operations(rows, tokens)
        weights = (lm.block_weights + head) * lm.weight_bytes
        return operations / self.machine.flops + weights / self.machine.weight_bandwidth

    def _elementwise(self, tokens: int, accesses: int) -> float:
        bytes_moved = tokens * accesses * self.lm.layers * self.lm.weight_bytes
        return bytes_moved / self.machine.bandwidth

    def _embedding_product(self, rows: int, columns: int) -> float:
        matrix = columns * self.lm.width
        groups = -(-rows // _ROWS_PER_GROUP)
        read = groups * matrix * FLOAT32 / self.machine.weight_bandwidth
        return 2.0 * rows * matrix / self.machine.flops_float32 + read
