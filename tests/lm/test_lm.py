import pytest
import torch
from helpers.tiny_models import KINDS, make_tokenizer

from dlmi import FrozenLM, InputError, load_lm
from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.lm.norm_gradients import scaled_norm_gradients
from dlmi.scoring.engine import Engine
from dlmi.scoring.losses import token_losses
from dlmi.scoring.passes import Pass
from dlmi.targets.context import Example
from dlmi.tokens.vocabulary import Vocabulary


@pytest.fixture(params=KINDS)
def lm(request, model_folder):
    return load_lm(str(model_folder(request.param)), dtype="float64")


@pytest.fixture
def sharing_lm(lm):
    """An LM whose cache can be shared: passes of others read no prefixes."""
    if not lm.can_share:
        pytest.skip("its cache cannot be shared")
    return lm


def random_ids(lm, rows, length, seed=0):
    columns = torch.randint(
        len(lm.prompt_token_ids), (rows, length), generator=torch.Generator().manual_seed(seed)
    )
    return lm.prompt_token_ids[columns]


def test_target_logits_are_the_full_models(lm):
    prompt_ids, target_ids = random_ids(lm, 3, 6), random_ids(lm, 3, 4, seed=1)
    full = lm.model(input_ids=torch.cat([prompt_ids, target_ids], 1)).logits
    logits = lm.target_logits(lm.embed(prompt_ids), target_ids)
    torch.testing.assert_close(logits, full[:, 5:9], rtol=1e-9, atol=1e-9)


def test_one_hot_soft_prompt_equals_hard_prompt(lm):
    prompt_ids, target_ids = random_ids(lm, 2, 5), random_ids(lm, 2, 3, seed=1)
    columns = torch.searchsorted(lm.prompt_token_ids, prompt_ids)
    one_hot = torch.nn.functional.one_hot(columns, len(lm.prompt_token_ids)).to(lm.dtype)
    soft = lm.target_logits(one_hot @ Vocabulary(lm).matrix, target_ids)
    torch.testing.assert_close(soft, lm.target_logits(lm.embed(prompt_ids), target_ids))


def test_greedy_equals_transformers_generate(lm):
    prompt_ids = random_ids(lm, 1, 6)
    expected = lm.model.generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        min_new_tokens=0,
        max_new_tokens=9,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(lm.greedy(prompt_ids, 9), expected[:, 6:])


def test_generated_side_by_side_is_generated_alone(lm):
    """Rows of many lengths, padded on the left; some end early, in whichever batch."""
    rows = [random_ids(lm, 1, length, seed=length)[0].tolist() for length in (7, 1, 4, 2, 9, 3)]
    alone = [lm.generate([row], 8)[0] for row in rows]
    for batch_size in (2, 6):
        assert lm.generate(rows, 8, batch_size=batch_size) == alone
    for row, said in zip(rows, alone, strict=True):
        free = lm.greedy(torch.tensor([row]), 8)[0].tolist()
        ended = next((i for i, token in enumerate(free) if token in lm.end_ids), 8)
        assert said == free[:ended]


def test_a_text_or_the_end_of_the_sequence_ends_a_row(tiny, monkeypatch):
    row = [5, 6, 7]
    free = tiny.greedy(torch.tensor([row]), 6)[0].tolist()
    third = free[2]
    first = free.index(third)
    stop = tiny.decode([third])
    assert tiny.generate([row], 6, stop)[0] == free[: first + 1]  # the token that ended it is kept
    monkeypatch.setattr(tiny, "end_ids", [third])
    assert tiny.generate([row, row], 6) == [free[:first]] * 2


def test_rows_that_do_not_fit_are_refused(tiny):
    with pytest.raises(InputError, match="text 2 has 60 \\+ 5"):
        tiny.generate([[3], [3] * 60], 5)
    with pytest.raises(InputError, match="at least 1 token"):
        tiny.generate([[]], 5)


def test_settings_that_a_model_ships_for_generation_are_left_out(model_folder, tmp_path):
    model = load_lm(str(model_folder()), dtype="float64").model
    rows = [[5, 6, 7], [8, 9]]
    expected = FrozenLM(model, make_tokenizer()).generate(rows, 8)
    model.generation_config.update(repetition_penalty=50.0, eos_token_id=[1, 9], num_beams=2)
    lm = FrozenLM(model, make_tokenizer())
    assert lm.end_ids == [1, 9]
    for said, plain in zip(lm.generate(rows, 8), expected, strict=True):
        assert said == plain[: plain.index(9)] if 9 in plain else said == plain


def test_passes_with_a_gradient_are_compiled_unless_hooks_must_run(tiny, monkeypatch):
    shapes = []

    def compiled(run):
        return lambda embeds, keep: (shapes.append(tuple(embeds.shape)), run(embeds, keep))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    lm = FrozenLM(tiny.model, tiny.tokenizer)
    embeds = lm.embed(random_ids(lm, 2, 3)).requires_grad_()
    target_ids = random_ids(lm, 2, 2)
    expected = lm.target_logits(embeds, target_ids)
    assert shapes == []
    lm.compile_passes = True
    torch.testing.assert_close(lm.target_logits(embeds, target_ids), expected)
    assert shapes == [(2, 4, 16)]
    lm.target_logits(embeds.detach(), target_ids)
    lm.target_logits(embeds, target_ids, lm.read_prefix(torch.tensor([4])))
    lm.free_run(embeds, 2)
    with scaled_norm_gradients(lm, 0.5):
        lm.target_logits(embeds, target_ids)
    assert shapes == [(2, 4, 16)]


def test_what_cannot_be_compiled_runs_as_it_is(tiny, monkeypatch):
    def fails(run):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", fails)
    lm = FrozenLM(tiny.model, tiny.tokenizer)
    lm.compile_passes = True
    embeds, target_ids = lm.embed(random_ids(lm, 1, 3)).requires_grad_(), random_ids(lm, 1, 2)
    with pytest.warns(UserWarning, match="not compiled.*RuntimeError: no compiler$"):
        logits = lm.target_logits(embeds, target_ids)
    torch.testing.assert_close(logits, lm.target_logits(embeds.detach(), target_ids))


class FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no kernel\nhere")


def test_a_backward_pass_that_cannot_be_compiled_is_made_again(tiny, monkeypatch):
    lm = FrozenLM(tiny.model, tiny.tokenizer)
    logits = torch.randn(3, len(Vocabulary(lm)), dtype=torch.float64).requires_grad_()
    asked = Pass(SoftPrompt(logits, logits.new_ones(3)), [Example("one", (3, 4, 5), "")])
    [expected] = Engine(Vocabulary(lm))([asked])
    [by_logits] = torch.autograd.grad(expected.losses.sum(), logits)
    monkeypatch.setattr(
        torch, "compile", lambda run: lambda *given: FailsBackwards.apply(run(*given))
    )
    lm.compile_passes = True
    with pytest.warns(UserWarning, match="not compiled.*RuntimeError: no kernel$"):
        [found] = Engine(Vocabulary(lm))([asked])
    torch.testing.assert_close(found.losses, expected.losses)
    torch.testing.assert_close(torch.autograd.grad(found.losses.sum(), logits)[0], by_logits)


def test_padding_on_the_right_changes_nothing(lm):
    prompt_embeds = lm.embed(random_ids(lm, 2, 5))
    target_ids = random_ids(lm, 2, 4, seed=1)
    padded = torch.cat([target_ids, target_ids[:, :3]], 1)
    torch.testing.assert_close(
        lm.target_logits(prompt_embeds, padded)[:, :4], lm.target_logits(prompt_embeds, target_ids)
    )


@pytest.mark.parametrize("teacher_forcing", [True, False])
def test_gradient_to_the_prompt_by_finite_differences(lm, teacher_forcing):
    prompt_embeds = lm.embed(random_ids(lm, 1, 3)).clone().requires_grad_()
    target_ids = random_ids(lm, 1, 3, seed=1)

    def loss(prompt_embeds):
        if teacher_forcing:
            logits = lm.target_logits(prompt_embeds, target_ids)
        else:
            logits = lm.free_run(prompt_embeds, 3)
        return token_losses("cross_entropy", logits, target_ids).mean(-1)

    # Wide steps: the norm layers of transformers compute in float32 even in a float64 model.
    assert torch.autograd.gradcheck(loss, prompt_embeds, eps=1e-3, atol=1e-2, rtol=1e-2)


def test_a_cached_prefix_is_the_same_as_reading_it(sharing_lm):
    lm = sharing_lm
    prefix_ids = random_ids(lm, 1, 3, seed=2)[0]
    prompt_ids, target_ids = random_ids(lm, 2, 5), random_ids(lm, 2, 4, seed=1)
    whole_ids = torch.cat([prefix_ids.expand(2, -1), prompt_ids], 1)
    gradients = []
    for embeds, prefix in (
        (lm.embed(whole_ids), None),
        (lm.embed(prompt_ids), lm.read_prefix(prefix_ids)),
    ):
        leaf = embeds.clone().requires_grad_()
        logits = lm.target_logits(leaf, target_ids, prefix)
        [gradient] = torch.autograd.grad(logits.logsumexp(-1).sum(), leaf)
        gradients.append((logits.detach(), gradient[:, -5:]))
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)
    prefix = lm.read_prefix(prefix_ids)
    assert torch.equal(lm.greedy(prompt_ids, 6, prefix), lm.greedy(whole_ids, 6))
    free = lm.free_run(lm.embed(prompt_ids), 6, prefix=prefix)
    torch.testing.assert_close(free, lm.free_run(lm.embed(whole_ids), 6), rtol=1e-7, atol=1e-9)


def test_a_prefix_grows_from_what_is_known(sharing_lm):
    """All keys and values are those of one pass."""
    lm = sharing_lm
    ids = random_ids(lm, 1, 6, seed=4)[0]
    grown, whole = lm.read_prefix(ids[2:], lm.read_prefix(ids[:2])), lm.read_prefix(ids)
    assert len(grown) == len(ids)
    prompt_ids, target_ids = random_ids(lm, 2, 3, seed=5), random_ids(lm, 2, 4, seed=6)
    logits = [lm.target_logits(lm.embed(prompt_ids), target_ids, p) for p in (grown, whole)]
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("prefix_ids", [[], [4, 9]])
def test_forced_and_greedy_are_those_run_apart(lm, prefix_ids):
    """With right beginnings of every length, from nothing to the whole target."""
    if prefix_ids and not lm.can_share:
        pytest.skip("its cache cannot be shared")
    prefix = lm.read_prefix(torch.tensor(prefix_ids)) if prefix_ids else None
    prompt_ids = random_ids(lm, 6, 5)
    target_ids = lm.greedy(prompt_ids, 5, prefix)
    for row in range(1, 6):
        target_ids[row, row - 1] = (target_ids[row, row - 1] + 1) % 30
    for rows in (slice(0, 6), slice(0, 1), slice(4, 6), slice(3, 4)):
        logits, output_ids = lm.forced_and_greedy(
            lm.embed(prompt_ids[rows]), target_ids[rows], prefix
        )
        forced = lm.target_logits(lm.embed(prompt_ids[rows]), target_ids[rows], prefix)
        torch.testing.assert_close(logits, forced, rtol=1e-7, atol=1e-9)
        assert torch.equal(output_ids, lm.greedy(prompt_ids[rows], 5, prefix))


def test_exact_under_teacher_forcing_means_exact_under_greedy(lm):
    prompt_ids = random_ids(lm, 4, 5)
    said = lm.greedy(prompt_ids, 6)
    assert torch.equal(lm.target_logits(lm.embed(prompt_ids), said).argmax(-1), said)


def test_perplexity_is_that_of_transformers(lm):
    ids = random_ids(lm, 1, 7)
    expected = lm.model(input_ids=ids, labels=ids).loss.exp()
    assert lm.perplexity(ids[0].tolist()) == pytest.approx(float(expected))
    assert lm.perplexity([3]) is None


def test_unused_vocabulary_rows_are_not_offered(model_folder):
    lm = load_lm(str(model_folder("gpt2")))
    assert lm.embedding_matrix.shape[0] == 32
    assert lm.prompt_token_ids.tolist() == list(range(30))  # this tokenizer has no BoS
    assert len(Vocabulary(lm).matrix) == 30


def test_scaled_embeddings_are_what_the_model_reads(model_folder):
    lm = load_lm(str(model_folder("gemma")), dtype="float64")
    weight = lm.model.get_input_embeddings().weight
    torch.testing.assert_close(lm.embedding_matrix, weight * 4.0)  # sqrt(hidden size)


def test_bos_rules(model_folder):
    assert load_lm(str(model_folder())).bos_id == 2
    assert load_lm(str(model_folder("gpt2"))).bos_id == 1  # no BoS: EoS
    assert load_lm(str(model_folder()), bos="w3").bos_id == 6
    assert load_lm(str(model_folder()), bos=7).bos_id == 7
    with pytest.raises(InputError, match="`bos`.*nonsense"):
        _ = load_lm(str(model_folder()), bos="nonsense").bos_id
    with pytest.raises(InputError, match="`bos`.*99"):
        _ = load_lm(str(model_folder()), bos=99).bos_id


def test_no_bos_and_no_eos_is_said(tiny):
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(InputError, match="neither BoS nor EoS"):
        _ = FrozenLM(tiny.model, tokenizer).bos_id


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_float32_logits(model_folder, dtype):
    lm = load_lm(str(model_folder()), dtype=dtype)
    logits = lm.target_logits(lm.embed(random_ids(lm, 1, 3)).float(), random_ids(lm, 1, 2))
    assert lm.dtype == getattr(torch, dtype)
    assert logits.dtype == torch.float32


def test_an_lm_says_what_it_is(tiny):
    assert repr(tiny) == f"FrozenLM({tiny.name!r}, LlamaForCausalLM, float64, cpu)"


def test_fingerprint_tells_models_apart(model_folder):
    first, again, other = (load_lm(str(model_folder(k))) for k in ("llama", "llama", "qwen2"))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_a_model_that_reads_ids_and_embeddings_differently_is_refused(tiny):
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = tiny.model, tiny.model.config

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            if inputs_embeds is not None:
                inputs_embeds = inputs_embeds * 3 + 1
            return self.inner(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)

    with pytest.raises(InputError, match="Shifted.*answers differently"):
        FrozenLM(Shifted(), tiny.tokenizer)
