"""Models that are spread over devices, offloaded or quantised.

There is one device here, so layers are spread over the CPU and the disk: that goes through the
same hooks of accelerate as several GPUs do. Quantised models run where bitsandbytes is installed.
"""

import pytest
import torch
from helpers.command_line import run
from helpers.methods import make_inverter
from helpers.weights import weights_hash

from dlmi import load_lm
from dlmi.errors import InputError
from dlmi.lm.loading import PACKAGED
from dlmi.lm.memory import RowsPerPass, graph_bytes
from dlmi.lm.placement import check_placed
from dlmi.run.data import LoadOptions
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import evaluate_alone
from dlmi.scoring.passes import Pass
from dlmi.scoring.verification import target_of
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

CPU = torch.device("cpu")
HALF_ON_DISK = {
    **{"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"},
    **{"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"},
}
OFFLOADED = "ignore:.*are offloaded"


@pytest.fixture(params=["llama", "llama_untied"])
def plain_and_spread(request, model_folder):
    folder = str(model_folder(request.param))
    with pytest.warns(UserWarning, match="% of the LM's weights are offloaded"):
        spread = load_lm(folder, "float64", lm_device_map=HALF_ON_DISK)
    return load_lm(folder, "float64"), spread


def test_a_spread_lm_is_the_same_lm(plain_and_spread):
    plain, spread = plain_and_spread
    assert spread.is_spread
    assert not plain.is_spread
    assert {p.device.type for p in spread.model.parameters()} == {"cpu", "meta"}
    assert spread.device == CPU
    assert spread.fingerprint() == plain.fingerprint()
    assert spread.dtype_name == "float64"
    ids, target_ids = torch.tensor([[4, 5, 6], [9, 8, 7]]), torch.tensor([[3, 4, 5], [7, 7, 9]])
    found = []
    for lm in (plain, spread):
        embeds = lm.embed(ids).requires_grad_()
        logits = lm.target_logits(embeds, target_ids, lm.read_prefix(torch.tensor([2, 3])))
        [gradient] = torch.autograd.grad(logits.log_softmax(-1)[..., 3].sum(), embeds)
        free = lm.free_run(lm.embed(ids), 3, prefix=lm.read_prefix(torch.tensor([2])))
        forced, greedy_ids = lm.forced_and_greedy(lm.embed(ids), target_ids)
        target = Target.single("t", (3, 4, 5), "")
        [scores] = Engine(Vocabulary(lm))([Pass(ids, target.examples, like_ids=ids[0])])
        found.append((logits, gradient, free, forced, greedy_ids, scores.losses))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)
    assert float(found[0][1].abs().max()) > 0


@pytest.mark.filterwarnings(OFFLOADED)
@pytest.mark.parametrize("name", ["dlmi", "gcg", "swap_search"])
def test_a_run_on_a_spread_lm_gives_the_same_rows(name, data, fit):
    rows = []
    for device_map in (None, HALF_ON_DISK):
        targets = data(per_k=1, load=LoadOptions(device_map=device_map))
        rows.append(fit(make_inverter(name, steps=5), targets))
    assert targets.lm.is_spread
    assert targets.compile is False, "hooks cut a compiled pass to pieces"
    for target_id, row in rows[0].items():
        other = rows[1][target_id]
        assert (row.prompt_ids, row.lcs) == (other.prompt_ids, other.lcs)
        assert (row.loss, row.fingerprint) == (other.loss, other.fingerprint)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential", {"": "cpu"}])
def test_a_map_onto_one_device_needs_no_hooks(device_map, model_folder, tiny):
    lm = load_lm(str(model_folder()), "float64", lm_device_map=device_map)
    assert not lm.is_spread
    assert weights_hash(lm) == weights_hash(tiny)


@pytest.mark.filterwarnings(OFFLOADED)
def test_compiling_a_spread_lm_is_refused(data):
    with pytest.raises(InputError, match="`data.compile`.*`data.load.device_map`"):
        data(load=LoadOptions(device_map=HALF_ON_DISK), compile=True).load()


def test_embeddings_must_lie_where_prompts_are_made(model_folder, tiny):
    untied = str(model_folder("llama_untied"))
    with pytest.raises(InputError, match="on cpu, but they are offloaded"):
        load_lm(untied, lm_device_map={"model": "disk", "lm_head": "cpu"})
    with pytest.raises(InputError, match="on cuda:1, but they lie on cpu"):
        check_placed(tiny.model, torch.device("cuda:1"))


def test_a_map_that_breaks_a_tie_is_one_line(model_folder):
    with pytest.raises(
        InputError, match="load.device_map`.*could not be loaded with them"
    ) as caught:
        load_lm(str(model_folder()), lm_device_map={"model": "disk", "lm_head": "cpu"})
    assert "\n" not in str(caught.value)


def test_memory_is_counted_on_every_device(tiny, monkeypatch):
    """The device with the least room for its part of the graph decides."""
    other = torch.device("cuda:1")
    per_row = graph_bytes(tiny, 8)[CPU]
    head = 4 * 4 * 4 * len(tiny.embedding_matrix)
    graphs = {CPU: per_row, other: 2 * per_row}
    room = {CPU: 100 * per_row, other: 10 * (2 * per_row + head)}
    monkeypatch.setattr("dlmi.lm.memory.graph_bytes", lambda lm, tokens: graphs)
    monkeypatch.setattr("dlmi.lm.memory.free_memory", room.get)
    monkeypatch.setattr(tiny, "rows_per_pass", RowsPerPass())  # what others measured is kept
    seen = []
    tiny.rows_per_pass.run(tiny, 12, 8, 4, seen.append, gradient=True)
    assert [part.stop - part.start for part in seen] == [6, 6]


# ---- quantised


def test_quantisation_without_the_package_is_one_line(model_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install bitsandbytes"):
        load_lm(str(model_folder()), quantization="int8")


@pytest.fixture
def quantised(model_folder):
    pytest.importorskip("bitsandbytes")
    return lambda bits, dtype="float32": load_lm(str(model_folder()), dtype, quantization=bits)


@pytest.mark.parametrize(("bits", "stored"), [("int8", torch.int8), ("int4", torch.uint8)])
def test_a_quantised_lm_is_inverted_and_verified(bits, stored, quantised, data, fit, tiny):
    lm = quantised(bits)
    layer = lm.model.model.layers[0].mlp.up_proj.weight
    assert layer.dtype == stored
    assert lm.dtype == lm.embedding_matrix.dtype == torch.float32
    assert lm.dtype_name == f"float32+{bits}"
    before = (lm.fingerprint(), layer.clone())
    targets = data(dtype="float32", load=LoadOptions(quantization=bits), per_k=1)
    rows = fit(make_inverter("dlmi", steps=5), targets)
    assert len(rows) == 2
    for row in rows.values():
        assert row.dtype == f"float32+{bits}"
        again = evaluate_alone(lm, row.prompt_ids, target_of(row, lm.bos_id), 0)
        assert again.output_ids == row.output_ids, "a fresh copy decodes the same"
    assert targets.lm.fingerprint() == before[0] == lm.fingerprint() != tiny.fingerprint()
    assert torch.equal(targets.lm.model.model.layers[0].mlp.up_proj.weight, before[1])


def test_the_gradient_of_four_bits_is_that_of_the_loss(quantised):
    lm = quantised("int4")
    embeds = lm.embed(torch.tensor([[4, 5, 6]]))
    direction = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0))

    def loss(x):
        return lm.last_logits(x, 1).log_softmax(-1)[..., 3].sum()

    leaf = embeds.clone().requires_grad_()
    [gradient] = torch.autograd.grad(loss(leaf), leaf)
    step = 1e-2
    slope = (loss(embeds + step * direction) - loss(embeds - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=0.05)


def test_a_checkpoint_that_is_quantised_already_loads(quantised, tmp_path):
    lm = quantised("int8")
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    again = load_lm(str(tmp_path))
    assert again.dtype_name == "float32+int8"
    assert again.fingerprint() == lm.fingerprint()
    assert load_lm(str(tmp_path), quantization="int8").fingerprint() == lm.fingerprint()
    with pytest.raises(InputError, match="comes in int8 and int4 is asked for"):
        load_lm(str(tmp_path), quantization="int4")


@pytest.mark.real
def test_the_packaged_lm_in_four_bits_is_verified_by_its_row(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    data = ["--data.lm", PACKAGED, "--data.load.quantization", "int4"]
    data += ["--data.targets", "Texts", "--data.targets.texts", '[" the"]']
    model = ["--model.method", "DLMI", "--model.method.num_samples", "1"]
    sizes = ["--model.prompt_length", "4", "--model.steps", "2", "--trainer.accelerator", "cpu"]
    assert run("fit", *model, *sizes, *data) == 0
    assert run("verify", "lightning_logs/version_0") == 0
