"""The penalty on unlikely prompts, against the LM's own distributions written out in full."""

import math

import pytest
import torch
from helpers.command_line import run
from helpers.methods import SMALL
from helpers.slots import random_ids
from helpers.tiny_models import KINDS, make_tokenizer
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from dlmi import InputError, Inverter, load_lm
from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.memory import RowsPerPass
from dlmi.methods import DLMI, GBDA, GCG, REINFORCE, SODA
from dlmi.report.names import restrictions, run_labels
from dlmi.rows import read_rows
from dlmi.scoring import fluency
from dlmi.scoring.engine import Engine
from dlmi.scoring.fluency import Fluency
from dlmi.scoring.losses import token_losses
from dlmi.scoring.passes import Account, Cost, Pass, Swaps
from dlmi.targets.context import Context, Example
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

# Norms of the tiny models are float32 inside, so another order of sums rounds differently.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_lm(kind, model_folder):
    """A tiny LM; `phi` has a bias in its head."""
    if kind != "phi":
        return load_lm(str(model_folder(kind)), dtype="float64")
    torch.manual_seed(0)
    config = PhiConfig(**SIZES, intermediate_size=32, bos_token_id=2, eos_token_id=1)
    model = PhiForCausalLM(config).double()
    torch.nn.init.normal_(model.lm_head.bias)
    return FrozenLM(model, make_tokenizer())


def example(length, start_ids=()):
    """A target of this many tokens, maybe with BoS before its prompt."""
    ids = tuple(range(3, 3 + length))
    return Example("t", ids, "", Context(start_ids=start_ids))


def written_out(lm, vocabulary, rows, start_ids=()):
    """Mean over i = 2..N of -sum_v pi_i(v) log q(v | ...), from rows (R, N, V)."""
    embeds = rows @ vocabulary.matrix
    if start_ids:
        start = lm.embed(torch.tensor([start_ids])).expand(len(rows), -1, -1)
        embeds = torch.cat([start, embeds], dim=1)
    log_probs = lm.last_logits(embeds, keep=rows.shape[1])[:, :-1].log_softmax(-1)
    return -(rows[:, 1:] * log_probs[..., vocabulary.token_ids]).sum(-1).mean(-1)


def file_of_tokens(tmp_path):
    path = tmp_path / "tokens.txt"
    path.write_text("".join(f"w{i}\n" for i in range(3, 20, 2)))
    return str(path)


@pytest.mark.parametrize("teacher_forcing", [True, False])
@pytest.mark.parametrize("prompt_bos", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "phi"])
def test_penalty_is_the_cross_entropy_of_the_rows(
    kind, model_folder, tmp_path, prompt_bos, teacher_forcing
):
    """Value and gradient, for tied heads and others, with fewer tokens than the LM has."""
    lm = make_lm(kind, model_folder)
    start_ids = (lm.bos_id,) if prompt_bos else ()
    for tokens in ("all", file_of_tokens(tmp_path)):
        vocabulary = Vocabulary(lm, [tokens])
        term = Fluency(vocabulary, 0.3)
        torch.manual_seed(1)
        logits = torch.randn(2, 3, 5, len(vocabulary), dtype=torch.float64, requires_grad=True)
        rows = (2 * logits).softmax(-1)  # (slots, prompts, N, V)

        def read(matrix, penalty, rows=rows, vocabulary=vocabulary):
            engine = Engine(vocabulary, penalty)
            passes = [
                Pass(own, [example(n, start_ids)], teacher_forcing=teacher_forcing)
                for own, n in zip(rows @ matrix, (4, 2), strict=True)
            ]
            scores = engine(passes)
            prices = [engine.price(asked, Account()) for asked in passes]
            return torch.cat([s.losses for s in scores]), [s.output_ids for s in scores], prices

        losses, output_ids, prices = read(term.matrix, term)
        plain, plain_ids, plain_prices = read(vocabulary.matrix, None)
        wanted = plain + 0.3 * written_out(lm, vocabulary, rows.flatten(0, 1), start_ids)
        torch.testing.assert_close(losses, wanted, **CLOSE)
        assert all(torch.equal(a, b) for a, b in zip(output_ids, plain_ids, strict=True))
        weights = torch.rand(6, dtype=torch.float64)
        [gradient] = torch.autograd.grad((losses * weights).sum(), logits, retain_graph=True)
        [expected] = torch.autograd.grad((wanted * weights).sum(), logits)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
        assert prices == plain_prices  # the penalty reads no token more
        if not prompt_bos:
            assert prices == [Cost(3 * 8, 3 * 8), Cost(3 * 6, 3 * 6)]


def test_penalty_of_a_discrete_prompt_is_the_logarithm_of_its_perplexity(tiny):
    ids = random_ids(tiny, 4, 6)
    vocabulary = Vocabulary(tiny)
    asked = Pass(ids, [example(3)], "margin")
    [penalised] = Engine(vocabulary, Fluency(vocabulary, 2.0))([asked])
    [plain] = Engine(vocabulary)([asked])
    expected = [2 * math.log(tiny.perplexity(row)) for row in ids.tolist()]
    assert (penalised.losses - plain.losses).tolist() == pytest.approx(expected, rel=1e-5)


def test_gradient_of_tokens_has_the_penalty(model_folder):
    """With respect to one-hot rows, for a head of its own: it orders the swaps."""
    lm = load_lm(str(model_folder("llama_untied")), dtype="float64")
    vocabulary = Vocabulary(lm)
    ids = random_ids(lm, 1, 5)
    tokens = vocabulary.for_target(Target.single("t", (3,), ""), key=0)
    asked = Pass(ids, [example(3)], swaps=Swaps(tokens, len(vocabulary)))
    [penalised] = Engine(vocabulary, Fluency(vocabulary, 0.7))([asked])
    one_hot = torch.nn.functional.one_hot(vocabulary.columns(ids), len(vocabulary)).double()
    one_hot.requires_grad_()
    target_ids = torch.tensor([example(3).ids])
    logits = lm.target_logits(one_hot @ vocabulary.matrix, target_ids)
    loss = token_losses("cross_entropy", logits, target_ids).mean()
    total = loss + 0.7 * written_out(lm, vocabulary, one_hot).sum()
    [gradient] = torch.autograd.grad(total, one_hot)
    in_order = gradient[0].gather(-1, vocabulary.columns(penalised.swap_ids))
    assert (in_order.diff(dim=-1) >= -1e-5).all()


def test_cuts_change_nothing(tiny, monkeypatch):
    """A few positions at a time, a row at a time."""
    vocabulary = Vocabulary(tiny)
    term = Fluency(vocabulary, 1.0)
    torch.manual_seed(0)
    rows = torch.rand(4, 5, len(vocabulary), dtype=torch.float64, requires_grad=True)

    def result():
        [scores] = Engine(vocabulary, term)([Pass(rows @ term.matrix, [example(3)], "margin")])
        return scores.losses, torch.autograd.grad(scores.losses.sum(), rows)[0]

    whole = result()
    monkeypatch.setattr(fluency, "_HELD_ENTRIES", 3 * 32)
    monkeypatch.setattr(tiny, "rows_per_pass", RowsPerPass(1))
    for got, expected in zip(result(), whole, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_gradient_is_that_of_finite_differences(tiny):
    """In a random direction of Z, through the softmax, at both ends of the penalty."""
    vocabulary = Vocabulary(tiny)
    engine = Engine(vocabulary, Fluency(vocabulary, 1.0))
    torch.manual_seed(0)
    logits = torch.randn(5, len(vocabulary), dtype=torch.float64)
    direction = torch.randn_like(logits)

    def loss(z):
        [scores] = engine([Pass(SoftPrompt(z, z.new_ones(5)), [example(3)])])
        return scores.losses.sum()

    step = 1e-2
    by_difference = float(loss(logits + step * direction) - loss(logits - step * direction))
    [gradient] = torch.autograd.grad(loss(logits.requires_grad_()), logits)
    assert float((gradient * direction).sum()) == pytest.approx(
        by_difference / (2 * step), rel=3e-3
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_variations_share_what_they_share(kind, model_folder, prompt_bos):
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    vocabulary = Vocabulary(lm)
    like_ids = random_ids(lm, 6)
    ids = like_ids.repeat(8, 1)
    for row, position in enumerate((0, 0, 1, 2, 4, 5, 5)):  # the last is the prompt itself
        ids[row, position] = random_ids(lm, 1, seed=row + 9)
    start_ids = (lm.bos_id,) if prompt_bos else ()
    asked = Pass(ids, [example(3, start_ids)], like_ids=like_ids)
    engines = Engine(vocabulary, Fluency(vocabulary, 0.7)), Engine(vocabulary)
    penalised, plain = (engine([asked])[0] for engine in engines)
    before = torch.tensor([start_ids] * 8, dtype=torch.int64)
    log_probs = lm.token_log_probs(torch.cat([before, ids], dim=1))[:, -5:]
    expected = -0.7 * log_probs.mean(-1)
    torch.testing.assert_close(penalised.losses - plain.losses, expected, **CLOSE)
    assert torch.equal(penalised.output_ids, plain.output_ids)
    prices = [engine.price(asked, Account()) for engine in engines]
    assert prices[0] == prices[1]  # no token more is read


# ---- methods


@pytest.mark.parametrize(
    "method",
    [
        DLMI(num_samples=2, tau0=0.7),
        DLMI(num_samples=2, tau0=0.7, estimator="straight_through"),
        DLMI(num_samples=2, teacher_forcing=False, next_token_tau=1.0),
        GBDA(num_samples=2, tau=0.7),
        SODA(),
        REINFORCE(num_samples=2),
        GCG(search_width=4, topk=4, first_prompt="random"),
    ],
)
def test_each_method_adds_the_penalty_of_its_own_rows(method, data, fit, monkeypatch):
    """The first loss with and without it, from what the method sends through the LM."""
    seen, read = [], Engine.__call__

    def spy(engine, passes):
        for asked in passes:
            prompts = asked.prompts
            if isinstance(prompts, SoftPrompt):
                [embeds] = soft_embeds([prompts], inverter.vocabulary.matrix)
                seen.append(embeds.detach())  # (S, N, d)
            elif asked.swaps is not None or isinstance(method, REINFORCE):  # no mere check
                seen.append(engine.lm.embed(prompts))
        return read(engine, passes)

    monkeypatch.setattr(Engine, "__call__", spy)
    losses = []
    for weight in (0.0, 0.5):
        inverter = Inverter(method, **{**SMALL, "steps": 1}, fluency=weight)
        targets = data(texts=["w1 w2 w3"])
        [row] = fit(inverter, targets).values()
        losses.append(row.trace[1].loss)
    first, second = seen
    assert torch.equal(first, second)
    states = targets.lm.model.base_model(inputs_embeds=first, use_cache=False).last_hidden_state
    log_totals = targets.lm.last_logits(first, keep=5).logsumexp(-1)
    # The weights are tied: what a row is read out by is its embedding.
    costs = log_totals[:, :-1] - (first[:, 1:] * states[:, :-1]).sum(-1)
    assert losses[1] - losses[0] == pytest.approx(0.5 * float(costs.mean()), rel=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        DLMI(num_samples=4, tau0=0.7),
        DLMI(num_samples=4, tau0=1.0, estimator="straight_through"),
        GBDA(num_samples=4, lr=0.3),
        SODA(),
        REINFORCE(num_samples=16, lr=0.3),
        GCG(search_width=16, topk=8),
    ],
)
def test_a_heavy_penalty_makes_prompts_likely(method, data, fit):
    """All else being equal, the last prompts of eight targets are much likelier."""

    def last_costs(weight):
        settings = {**SMALL, "steps": 60, "eval_every": 60}
        inverter = Inverter(method, **settings, fluency=weight)
        rows = fit(inverter, data(k=(3,), per_k=8, batch_size=8))
        return sum(math.log(row.prompt_perplexity) for row in rows.values()) / len(rows)

    assert last_costs(10.0) < last_costs(0.0) - 0.5


@pytest.mark.parametrize("kind", ["llama", "llama_untied"])
def test_bfloat16_is_close_to_float64(kind, model_folder):
    torch.manual_seed(0)
    vectors = torch.randn(2, 5, 31, dtype=torch.float64)
    penalties = []
    for dtype in ("float64", "bfloat16"):
        lm = load_lm(str(model_folder(kind)), dtype=dtype)
        compute = torch.float64 if dtype == "float64" else torch.float32
        logits = vectors.to(compute).requires_grad_()
        term = Fluency(Vocabulary(lm), 1.0)
        rows = logits.softmax(-1) @ term.matrix.to(compute)
        [scores] = Engine(term.vocabulary, term)([Pass(rows, [example(3)])])
        [gradient] = torch.autograd.grad(scores.losses.sum(), logits)
        penalties.append((scores.losses.detach().double(), gradient.double()))
    (exact, exact_gradient), (rough, rough_gradient) = penalties
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.1)
    cosine = torch.cosine_similarity(exact_gradient.flatten(), rough_gradient.flatten(), dim=0)
    assert cosine > 0.97


# ---- what is refused


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_weight_must_be_a_number_from_0_on(weight):
    with pytest.raises(InputError, match=r"Expected `model\.fluency` to be at least 0"):
        Inverter(SODA(), fluency=weight)


def test_one_token_has_none_before_it():
    with pytest.raises(InputError, match=r"`model\.prompt_length` to be at least 2"):
        Inverter(SODA(), prompt_length=1, fluency=0.1)
    Inverter(SODA(), prompt_length=1)


def test_an_lm_with_another_head_is_refused_by_name():
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES,
        intermediate_size=32,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.1,
    )
    lm = FrozenLM(Gemma2ForCausalLM(config), make_tokenizer(), name="capped")
    with pytest.raises(InputError, match=r"`model\.fluency` to be 0 with capped \(Gemma2"):
        Fluency(Vocabulary(lm), 0.1)


def test_the_command_line_takes_a_weight(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = f"--data.lm={model_folder()} --data.dtype=float64 --data.targets.k=[1]"
    targets = "--data.targets.per_k=1 --data.targets.length=3 --trainer.accelerator=cpu"
    model = "--model.method=SODA --model.prompt_length=4 --model.steps=2 --model.fluency=0.2"
    assert run("fit", *model.split(), *data.split(), *targets.split()) == 0
    [row] = read_rows(tmp_path / "lightning_logs" / "version_0")
    assert row.settings["fluency"] == 0.2
    assert row.prompt_perplexity > 1


def test_reports_tell_fluent_runs_apart(data, fit):
    """The paper's claims are not about them; rows from before there was a weight count as plain."""
    settings = {}
    for weight in (0.0, 0.3):
        rows = fit(Inverter(DLMI(num_samples=1), **SMALL, fluency=weight), data(k=(1,), per_k=1))
        settings[weight] = next(iter(rows.values()))
    plain, fluent = settings[0.0], settings[0.3]
    del plain.settings["fluency"]
    assert restrictions(plain.settings) == {}
    assert restrictions(fluent.settings) == {"fluency": 0.3}
    labels = run_labels([(None, [plain]), (None, [fluent])])
    assert labels == ["DLMI(100) fluency=0.0", "DLMI(100) fluency=0.3"]
    assert run_labels([(None, [plain])]) == ["DLMI(100)"]


@pytest.mark.parametrize("kind", ["llama", "llama_untied"])
def test_mixed_precision_and_a_compiled_lm_run_too(kind, model_folder, data, fit):
    """Hidden states come in bfloat16 there; passes with the penalty are not compiled."""
    options = {"lm": str(model_folder(kind)), "k": (1,), "per_k": 2}
    for more, trainer in (
        ({"dtype": "float32"}, {"precision": "bf16-mixed"}),
        ({"compile": True}, {}),
    ):
        inverter = Inverter(DLMI(num_samples=2), **SMALL, fluency=0.3)
        for row in fit(inverter, data(**options, **more), **trainer).values():
            assert row.stop_reason in ("solved", "budget")
            assert math.isfinite(row.trace[-1].loss)
