"""The cost model against what PyTorch counts, and the queue's end against arithmetic."""

import json
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dlmi import DLMI, TargetDataModule, load_lm
from dlmi.bench import prediction, projection
from dlmi.bench.cost_model import CostModel, Machine
from dlmi.bench.lm_sizes import Size, Sizes
from dlmi.bench.queue_tail import ideal_seconds, makespan, unequal_steps
from dlmi.bench.scaling import bench_targets
from dlmi.cli import main
from dlmi.memory import graph_bytes
from dlmi.quiet_run import run_quietly

LLAMAS = ["llama", "llama_untied"]
MACHINE = Machine(3e11, 2e11, 1e11, 2e10, 3e10, (3e-9, 4e-9), (2e-4, 4e-4), 3e-3, 2e-4)


@pytest.fixture(params=LLAMAS)
def lm(request, model_folder):
    return load_lm(str(model_folder(request.param)), dtype="float32")


def test_weights_are_counted_to_the_byte(lm):
    sizes = Sizes.of(lm.model)
    assert sizes.lm_bytes == sum(p.nbytes for p in lm.model.parameters())
    assert Sizes.of_config(lm.model.config, torch.float32) == sizes


@pytest.mark.parametrize("kind", LLAMAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_is_counted_to_the_byte(model_folder, kind, dtype):
    lm = load_lm(str(model_folder(kind)), dtype=dtype)
    for tokens in (3, 9):
        [held] = graph_bytes(lm, tokens).values()  # one device
        assert held == tokens * Sizes.of(lm.model).graph_bytes_per_token


def test_slots_are_counted_to_the_byte(lm):
    """Z, its gradient and Adam's moments of a real run, after a step."""
    held = []

    class Weigh(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            tensors = [t for z in module.Z for t in (z, z.grad)]
            for z in module.Z:
                state = trainer.optimizers[0].state[z]
                tensors += [state["exp_avg"], state["exp_avg_sq"]]
            held.append(sum(t.nbytes for t in tensors))

    size = Size(5, 3, 2, V=len(lm.prompt_token_ids), slots=3)
    data = TargetDataModule.of(lm, bench_targets(lm, 3, 3), batch_size=3, compile=False)
    run_quietly(DLMI(size.N, steps=1, num_samples=size.S), data, [Weigh()])
    assert held == [size.slots * Sizes.of(lm.model).slot_bytes(size)]


def test_cache_is_counted_to_the_byte(lm):
    embeds = lm.embed(torch.ones(3, 7, dtype=torch.int64))
    cache = lm.model(inputs_embeds=embeds, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == Sizes.of(lm.model).cache_bytes(3, 7)


@pytest.mark.parametrize("kind", LLAMAS)
def test_operations_are_those_that_torch_counts(model_folder, kind):
    """Eager attention, so that its products are counted; a fused one makes its scores again."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(kind), attn_implementation="eager")
    model.requires_grad_(False)
    sizes, size = Sizes.of(model), Size(5, 4, 3)
    embeds = torch.rand(size.rows, size.tokens, sizes.width, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        logits = model(inputs_embeds=embeds, use_cache=False, logits_to_keep=size.M).logits
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(logits.sum(), embeds)
    expected = sizes.pass_operations(size.rows, size.tokens, size.M)
    # The products of rotary angles with positions, 2 x tokens x half a head, are counted, too.
    angles = 2 * size.tokens * (sizes.query_width // sizes.heads // 2)
    assert forward.get_total_flops() - expected in (0, angles)
    scores_again = sizes.attention_operations(size.rows, size.tokens) / 2
    with_e = 4 * size.rows * size.N * sizes.vocabulary * sizes.width
    counted = expected + backward.get_total_flops() + scores_again + with_e
    assert sizes.step_operations(size) == counted


class _Accesses(TorchDispatchMode):
    """Numbers read and written by what is neither a product nor a view."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        products = ("mm", "bmm", "_unsafe_view")
        if not (function.is_view or name in products or "attention" in name):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.count += sum(t.numel() for t in tensors)
        return out


def test_elementwise_work_is_what_torch_does(lm):
    """What one layer more adds."""
    rows, tokens = 3, 10
    counts = []
    for layers in (1, 2):
        config = lm.model.config.__class__(
            **{
                **lm.model.config.to_dict(),
                "num_hidden_layers": layers,
                "hidden_size": 96,
                "intermediate_size": 160,
                "head_dim": 48,
            }
        )
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
        embeds = torch.rand(rows, tokens, 96, requires_grad=True)
        with _Accesses() as forward:
            logits = model(inputs_embeds=embeds, use_cache=False).logits
        with _Accesses() as backward:
            torch.autograd.grad(logits.sum(), embeds)
        counts.append((forward.count, backward.count))
    sizes = Sizes.of(model)
    for way, expected in enumerate((sizes.forward_accesses, sizes.backward_accesses)):
        added = counts[1][way] - counts[0][way]
        assert added / (rows * tokens) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ["N", "M", "S", "V", "slots"])
def test_more_costs_more(lm, name):
    costs = CostModel(Sizes.of(lm.model), MACHINE)
    size = Size(20, 8, 2, 20, 2)
    larger = replace(size, **{name: 2 * getattr(size, name)})
    assert costs.step_seconds(larger) > costs.step_seconds(size)
    assert costs.lm.step_operations(larger) > costs.lm.step_operations(size)
    assert costs.lm.step_bytes(larger) >= costs.lm.step_bytes(size)
    assert costs.run_seconds(size, 8, 20, 5) == pytest.approx(2 * costs.run_seconds(size, 4, 20, 5))


def test_the_command_compares_with_the_clock(model_folder, tmp_path, monkeypatch, capsys):
    sizes = (Size(5, 4, 2), Size(5, 4, 1, slots=2))
    monkeypatch.setattr(prediction, "PREDICTED_SIZES", sizes)
    out = tmp_path / "bench.json"
    options = ["--parts", "[model]", "--repeats", "2", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--lm", str(model_folder()), *options])
    assert ended.value.code == 0
    assert "predicted / measured" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert all(report["machine_speed"][name] > 0 for name in ("flops", "bandwidth", "step_seconds"))
    *steps, run = report["predictions"]
    assert [step["size"]["slots"] for step in steps] == [1, 2]
    for line in (*steps, run):
        assert line["ratios"]["seconds"] == line["predicted_seconds"] / line["seconds"]
        assert line["predicted_seconds"] > 0
    # On so small an LM the blocks of the soft embedding are all: counted, not timed.
    assert all(step["ratios"]["peak"] == pytest.approx(1, abs=0.1) for step in steps)
    assert run["peak_bytes"] is None


def test_the_end_of_a_queue():
    def per_slot(slots):
        return float(slots)

    assert makespan([3, 3, 3, 3], 2, 1, per_slot) == 6
    assert makespan([4, 2, 2], 2, 1, per_slot) == 4  # the second rank takes the third target
    assert makespan([4, 2], 1, 2, per_slot) == 2 * 2 + 2 * 1  # alone, the longer one is faster
    assert makespan([5], 3, 2, per_slot) == 5  # ranks without a target end at once
    steps = unequal_steps(50, 100)
    assert len(set(steps)) > 10
    for ranks, slots in ((1, 1), (4, 1), (4, 3), (60, 2)):
        ideal = ideal_seconds(steps, ranks, slots, per_slot)
        took = makespan(steps, ranks, slots, per_slot)
        assert ideal <= took <= ideal + 100 * per_slot(slots)


def test_projection_follows_from_the_sizes():
    lm = Sizes.of_config(projection.LMS["SmolLM3-3B"], torch.bfloat16)
    assert lm.slot_bytes(Size(80)) == 80 * 128256 * 16
    assert 3.0e9 < lm.parameters < 3.2e9
    size = Size(80, 20, 8)
    fewer, more = (projection.slots_that_fit(lm, size, one_pass) for one_pass in (True, False))
    assert 0 < fewer < more
    rates = [projection.targets_per_hour(lm, size, 2048, share) for share in projection.SHARES]
    assert rates == sorted(rates)
