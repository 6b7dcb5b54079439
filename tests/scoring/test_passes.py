"""The engine: passes cut to fit the memory, and shared where prompts agree."""

import itertools
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from helpers.methods import SMALL
from helpers.slots import CPU, random_ids
from helpers.tiny_models import KINDS

from dlmi import InputError, Inverter, load_lm
from dlmi.lm.memory import RowsPerPass, free_memory, graph_bytes, is_out_of_memory
from dlmi.methods import ADC, DLMI
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import evaluate
from dlmi.scoring.losses import token_losses
from dlmi.scoring.passes import Account, Cost, Pass
from dlmi.targets.target import Target, with_start_ids
from dlmi.tokens.vocabulary import Vocabulary

TARGETS = [Target.single("a", (4, 9, 5, 7), ""), Target.single("b", (6, 3), "")]

# ---- losses and their gradients, a few rows at a time


@pytest.mark.parametrize("teacher_forcing", [True, False])
@pytest.mark.parametrize("rows_per_pass", [1, 2, 5, "auto"])
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_a_pass_in_cuts_gives_what_one_graph_gives(
    tiny, monkeypatch, teacher_forcing, rows_per_pass, prompt_bos
):
    monkeypatch.setattr(tiny, "rows_per_pass", RowsPerPass(rows_per_pass))
    targets = with_start_ids(TARGETS, (tiny.bos_id,) if prompt_bos else ())
    samples = 3
    embeds = tiny.embed(random_ids(tiny, 2, samples, 5)).clone().requires_grad_()
    scores = Engine(Vocabulary(tiny))(
        [
            Pass(own, target.examples, teacher_forcing=teacher_forcing)
            for own, target in zip(embeds, targets, strict=True)
        ]
    )
    losses = torch.stack([one.losses for one in scores])
    weights = torch.rand(2, samples, dtype=torch.float64)
    [gradient] = torch.autograd.grad((losses * weights).sum(), embeds)

    expected = torch.zeros(2, samples, dtype=torch.float64)
    for b, s in itertools.product(range(2), range(samples)):
        target_ids = torch.tensor([targets[b].ids])
        row = embeds[b, s][None]
        if prompt_bos:
            row = torch.cat([tiny.embed(torch.tensor([[tiny.bos_id]])), row], 1)
        logits = (
            tiny.target_logits(row, target_ids)
            if teacher_forcing
            else tiny.free_run(row, target_ids.shape[1])
        )
        expected[b, s] = token_losses("cross_entropy", logits, target_ids).mean()
        assert torch.equal(scores[b].output_ids[s], logits[0].argmax(-1))
    # The tiny Llama's norms are float32 inside, so a batch rounds differently from a row.
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    [wanted] = torch.autograd.grad((expected * weights).sum(), embeds)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_a_pass_without_gradient_charges_none(tiny):
    engine = Engine(Vocabulary(tiny))
    asked = Pass(random_ids(tiny, 2, 5), TARGETS[0].examples)
    [scores] = engine([asked])
    assert not scores.losses.requires_grad
    assert engine.price(asked, Account()) == Cost(2 * 8, 0)


@pytest.mark.parametrize(
    "method", [DLMI(num_samples=3), ADC(restarts=3, lr=1.0)], ids=["dlmi", "adc"]
)
def test_rows_per_pass_changes_no_result(method, data, fit):
    def found(rows_per_pass):
        rows = fit(Inverter(method, **SMALL), data(rows_per_pass=rows_per_pass))
        return {i: (row.prompt_ids, row.output_ids, row.steps) for i, row in rows.items()}

    assert found(1) == found(4) == found("auto")


# ---- memory


def test_a_row_takes_what_its_graph_holds(tiny):
    short, long = (graph_bytes(tiny, tokens)[CPU] for tokens in (10, 20))
    assert 1.7 < long / short < 2.5
    activations = 20 * 16 * 8 * 2  # tokens x width x float64 x layers, once each
    assert 5 * activations < long < 100 * activations


def test_auto_fits_the_free_memory(tiny, monkeypatch):
    per_row = graph_bytes(tiny, 8)[CPU] + 4 * 4 * 4 * 32  # and its logits: 4 of 32 numbers
    monkeypatch.setattr("dlmi.lm.memory.free_memory", lambda device: 10 * per_row)
    limits = RowsPerPass()
    cuts = []
    for rows, gradient in ((14, True), (3, True), (14, False)):
        seen = []
        limits.run(tiny, rows, 8, 4, seen.append, gradient)
        cuts.append([part.stop - part.start for part in seen])
    # At most 6 fit, in even cuts; more where no graph is held.
    assert cuts == [[5, 5, 4], [3], [14]]


def test_free_memory_is_that_of_this_machine():
    free = free_memory(CPU)
    assert 2**27 < free < 2**50
    assert free_memory(torch.device("meta")) is None


def test_running_out_halves_the_rows_and_goes_on(tiny):
    done, tried = [], []

    def work(rows):
        tried.append(rows.stop - rows.start)
        if rows.stop - rows.start > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.extend(range(rows.start, rows.stop))

    limits = RowsPerPass(16)
    with pytest.warns(UserWarning, match="Out of memory: now"):
        limits.run(tiny, 10, 8, 4, work)
    assert done == list(range(10))
    assert tried[:3] == [10, 5, 3]
    limits.run(tiny, 4, 8, 4, work)  # what did not fit once is not tried again
    assert max(tried[3 + 4 :]) <= 3


def test_one_row_that_does_not_fit_is_an_error(tiny):
    def work(rows):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError):
            RowsPerPass(4).run(tiny, 4, 8, 4, work)


def test_other_errors_are_not_taken_for_it():
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert is_out_of_memory(MemoryError())
    for message in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ):
        assert is_out_of_memory(RuntimeError(message))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_a_real_shortage_is_survived(model_folder):
    """A process that may use little memory, and a batch that needs more."""
    script = f"""
        import resource, warnings
        import torch
        from dlmi import load_lm
        from dlmi.lm.memory import RowsPerPass
        from dlmi.scoring.engine import Engine
        from dlmi.scoring.passes import Pass
        from dlmi.targets.target import Target
        from dlmi.tokens.vocabulary import Vocabulary

        torch.set_num_threads(1)
        lm = load_lm({str(model_folder())!r}, dtype="float32")
        examples = Target.single("t", tuple(range(3, 23)), "").examples
        embeds = lm.embed(torch.randint(3, 30, (3000, 40))).clone().requires_grad_()
        engine = Engine(Vocabulary(lm))

        def gradient(setting):
            lm.rows_per_pass = RowsPerPass(setting)
            [scores] = engine([Pass(embeds, examples)])
            return torch.autograd.grad(scores.losses.sum(), embeds)[0]

        wanted = gradient(100)
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 300 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = gradient(3000)
        assert any("Out of memory" in str(w.message) for w in caught), "nothing ran out"
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
        print("survived")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("survived"), done.stderr[-2000:]


@pytest.mark.parametrize("setting", [0, -3])
def test_bad_rows_per_pass_is_refused(setting, data):
    with pytest.raises(InputError, match="`data.rows_per_pass`.*at least 1"):
        data(rows_per_pass=setting)


# ---- variations that share a beginning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_scores_are_those_of_whole_passes(kind, prompt_bos, model_folder, monkeypatch):
    lm = load_lm(str(model_folder(kind)), dtype="float64", bos="<eos>")
    lm.rows_per_pass = RowsPerPass(3)
    prompt_ids = random_ids(lm, 6)
    candidate_ids = prompt_ids.repeat(20, 1)
    for row in range(1, 20):  # row 0 is the prompt itself; some differ in two places
        candidate_ids[row, row % 6] = lm.prompt_token_ids[row]
        candidate_ids[row, (row * row) % 6] = lm.prompt_token_ids[row + 3]
    start_ids = (lm.bos_id,) if prompt_bos else ()
    [target] = with_start_ids([Target.single("t", (4, 9, 5), "")], start_ids)
    engine = Engine(Vocabulary(lm))
    asked = Pass(candidate_ids, target.examples, like_ids=prompt_ids)
    [scores] = engine([asked])
    whole = evaluate(lm, candidate_ids, [target] * 20, [0] * 20)
    expected = torch.tensor([e.discrete_loss for e in whole], dtype=torch.float64)
    torch.testing.assert_close(scores.losses, expected, rtol=1e-6, atol=1e-9)
    for row, evaluation in enumerate(whole):  # forced and free agree on the first token
        assert int(scores.output_ids[row, 0]) == evaluation.output_ids[0]
    before = len(start_ids)
    full = 20 * (before + 6 + 2)
    first = [next((i for i in range(6) if row[i] != prompt_ids[i]), 5) for row in candidate_ids]
    shared = sum(6 - i + 2 for i in first) + before + max(first)  # and once what they share
    assert engine.price(asked, Account()).total == (full if kind == "mistral" else shared)
    assert lm.can_pack == (kind != "mistral")


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_run_finds_the_same(data, fit):
    def found(compile):
        inverter = Inverter(DLMI(num_samples=2), **{**SMALL, "steps": 2})
        rows = fit(inverter, data(compile=compile, k=(3,), per_k=1))
        return {i: (row.prompt_ids, row.steps) for i, row in rows.items()}

    assert found(True) == found(False)
