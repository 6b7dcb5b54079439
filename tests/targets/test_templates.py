"""Fixed tokens around the learned ones: layout, templates, and every method in them."""

import json

import pytest
import torch
from helpers.by_hand import by_hand
from helpers.command_line import CONFIGS, run
from helpers.contexts import CONTEXTS, targets_in_context
from helpers.methods import SMALL, make_inverter
from helpers.resuming import stop_and_resume
from helpers.runs import StopAfter, assert_same, comparable
from helpers.tiny_models import KINDS, make_tokenizer

from dlmi import InputError, Inverter, Target, invert, load_lm
from dlmi.lm.memory import RowsPerPass
from dlmi.methods import DLMI
from dlmi.rows import read_rows
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import evaluate
from dlmi.scoring.losses import token_losses
from dlmi.scoring.passes import Account, Cost, Pass
from dlmi.targets.template import Template
from dlmi.tokens.vocabulary import Vocabulary

N = 5
OF_EACH_KIND = ("dlmi", "gcg", "swap_search_window", "soda_refined")


def random_prompts(*shape):
    return torch.randint(3, 30, shape, generator=torch.Generator().manual_seed(1))


# ---- passes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_pass", [2, "auto"])
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_losses_and_gradients_are_those_of_whole_prompts(
    kind, rows_per_pass, prompt_bos, model_folder
):
    lm = load_lm(str(model_folder(kind)), dtype="float64", bos="<eos>")
    lm.rows_per_pass = RowsPerPass(rows_per_pass)
    engine = Engine(Vocabulary(lm))
    for contexts in (CONTEXTS, CONTEXTS[:1] * 2, CONTEXTS[:2], CONTEXTS[4:] * 2):
        targets = targets_in_context(contexts, [lm.bos_id] * prompt_bos)
        embeds = lm.embed(random_prompts(len(targets), 2, N)).clone().requires_grad_()
        found = engine([Pass(embeds[b], t.examples) for b, t in enumerate(targets)])
        losses = torch.stack([scores.losses for scores in found])
        weights = torch.linspace(0.2, 1, losses.numel(), dtype=torch.float64).view_as(losses)
        [gradient] = torch.autograd.grad((losses * weights).sum(), embeds)
        expected = torch.zeros_like(losses)
        for b, target in enumerate(targets):
            for s in range(2):
                logits, _ = by_hand(lm, target.examples[0].context, embeds[b, s], target.ids)
                wanted = torch.tensor(target.ids)
                expected[b, s] = token_losses("cross_entropy", logits, wanted).mean()
                assert torch.equal(found[b].output_ids[s], logits.argmax(-1))
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        [by_whole] = torch.autograd.grad((expected * weights).sum(), embeds)
        torch.testing.assert_close(gradient, by_whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_free_runs_and_evaluations_are_those_of_whole_prompts(kind, prompt_bos, model_folder):
    lm = load_lm(str(model_folder(kind)), dtype="float64", bos="<eos>")
    lm.rows_per_pass = RowsPerPass(3)
    targets = targets_in_context(start_ids=[lm.bos_id] * prompt_bos)
    prompt_ids = random_prompts(len(targets), N)
    evaluations = evaluate(lm, prompt_ids, targets, [0] * len(targets))
    free = Engine(Vocabulary(lm))(
        [
            Pass(ids[None], target.examples, teacher_forcing=False)
            for ids, target in zip(prompt_ids, targets, strict=True)
        ]
    )
    for row, target in enumerate(targets):
        context = target.examples[0].context
        ids = context.ids(prompt_ids[row].tolist())
        assert ids[:prompt_bos] == (lm.bos_id,) * prompt_bos
        said = lm.greedy(torch.tensor([ids]), len(target.ids))[0]
        assert evaluations[row].output_ids == tuple(said.tolist())
        assert torch.equal(free[row].output_ids[0], said)
        logits, _ = by_hand(lm, context, lm.embed(prompt_ids[row]), target.ids)
        log_q = logits.log_softmax(-1)[range(len(target.ids)), target.ids]
        assert evaluations[row].discrete_loss == pytest.approx(float(-log_q.mean()), rel=1e-5)


def test_the_head_runs_on_target_tokens_alone(tiny):
    """Neither fixed tokens nor rows of other lengths make logits that nobody needs."""
    seen = []
    handle = tiny.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(output.shape[:2]))
    )
    examples = [target.examples[0] for target in targets_in_context()]
    Engine(Vocabulary(tiny))([Pass(random_prompts(1, N), examples)])
    handle.remove()
    assert seen[-1] == (1, sum(len(example.ids) for example in examples))


def test_a_shared_beginning_is_paid_for_once(tiny):
    targets = targets_in_context(CONTEXTS[:4])
    assert {target.examples[0].context.read_once for target in targets} == {2}
    engine, account = Engine(Vocabulary(tiny)), Account()
    asked = Pass(random_prompts(1, N), targets[0].examples)
    fixed, beginning = 4, 2
    each = N + fixed - beginning + len(targets[0].ids) - 1
    costs = [engine.price(asked, account) for _ in range(2)]
    assert costs == [Cost(beginning + each), Cost(each)]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_candidates_are_scored_in_their_contexts(kind, context, model_folder):
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    [target] = targets_in_context([context])
    [prompt_ids] = random_prompts(1, N)
    candidate_ids = prompt_ids.repeat(7, 1)
    for row in range(1, 7):
        candidate_ids[row, row % N] = row + 2
    [scores] = Engine(Vocabulary(lm))([Pass(candidate_ids, target.examples, like_ids=prompt_ids)])
    whole = evaluate(lm, candidate_ids, [target] * 7, [0] * 7)
    expected = torch.tensor([e.discrete_loss for e in whole], dtype=torch.float64)
    torch.testing.assert_close(scores.losses, expected, rtol=1e-6, atol=1e-9)
    assert scores.output_ids[:, 0].tolist() == [e.output_ids[0] for e in whole]


# ---- every method

LINES = [
    {"id": "a", "question": "w1 w2 w3", "text": " w4 w5"},
    {"id": "b", "question": "w6", "text": " w7 w8 w9"},
    {"id": "c", "question": "w10 w11", "text": " w12"},
]
TEMPLATE = "w20 {question} {slot:2} w21 {slot} w22"


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return {"file": path, "template": TEMPLATE}


def test_every_method_works_in_a_template(make_framed_method, data, fit, questions):
    """What a row records is what the model itself says to the whole prompt."""
    targets = data(**questions, batch_size=3)
    rows = fit(make_framed_method(), targets)
    lm = targets.lm
    for line in LINES:
        row = rows[line["id"]]
        full_text = (
            f"w20 {line['question']} {lm.decode(row.prompt_ids[:2])} w21 "
            f"{lm.decode(row.prompt_ids[2:])} w22"
        )
        assert row.full_text == full_text
        assert lm.encode(full_text) == list(row.full_ids)
        assert row.round_trips
        said = lm.greedy(torch.tensor([row.full_ids]), len(row.target_ids))[0]
        assert tuple(said.tolist()) == row.output_ids
        assert row.context.template == TEMPLATE
        wanted = torch.tensor([[*row.full_ids, *row.target_ids]])
        log_q = lm.token_log_probs(wanted)[0, -len(row.target_ids) :]
        assert row.discrete_loss == pytest.approx(float(-log_q.mean()), rel=1e-5)
        assert row.lcs == row.lcs_matrix["best_so_far"]["free_greedy"] == row.round_trip_lcs
        empty = lm.encode(f"w20 {line['question']} w21 w22")
        said = lm.greedy(torch.tensor([empty]), len(row.target_ids))[0].tolist()
        exact = row.lcs_matrix["no_prompt"]["free_greedy"] == 1
        assert exact == (said == list(row.target_ids))


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_neither_batch_mates_nor_a_stop_matter_in_a_template(name, data, fit, questions, tmp_path):
    expected = fit(make_inverter(name), data(**questions))
    assert_same(fit(make_inverter(name), data(**questions, batch_size=1)), expected)
    folder = tmp_path / "run"
    rows = stop_and_resume(lambda: make_inverter(name), lambda: data(**questions), fit, folder)
    assert comparable(rows) == comparable(expected)


def test_another_template_is_another_run(data, fit, questions, tmp_path):
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run"}
    callbacks = [StopAfter(2), RunCheckpoint()]
    fit(make_inverter("dlmi"), data(**questions), callbacks=callbacks, **options)
    other = {**questions, "template": TEMPLATE.replace("w21", "w23")}
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.raises(InputError, match="targets"):
        fit(make_inverter("dlmi"), data(**other), ckpt_path=path, **options)


def test_gcg_keeps_to_prompts_that_survive_in_their_template(data, fit, questions):
    rows = fit(make_inverter("gcg", allowed_tokens="round_trip"), data(**questions))
    assert all(row.round_trips for row in rows.values())


# ---- chats


@pytest.fixture
def chat_folder(model_folder, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w1' if m.role == 'user' else 'w9' }} {{ m['content'] }} w2 "
        "{% endfor %}{% if add_generation_prompt %}w3{% endif %}"
    )
    folder = tmp_path / "chat"
    load_lm(str(model_folder()), dtype="float64").model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_chat_of_the_prompt_alone(data, fit, chat_folder):
    rows = fit(Inverter(DLMI(), **SMALL), data(lm=chat_folder, chat=True, texts=[" w4 w5"]))
    [row] = rows.values()
    assert row.full_text == f"w1 {row.prompt_text} w2 w3"
    assert row.context.chat
    assert row.context.template == "{slot}"


def test_messages_are_rows_that_are_verified_and_runs_that_are_resumed(
    data, fit, chat_folder, tmp_path, capsys
):
    messages = [
        {"role": "system", "content": "w10 w11"},
        {"role": "user", "content": "w12 {slot} w13"},
    ]
    own = {"template": "w14 {slot}", "chat": False}
    lines = [{"id": "a", "text": " w4 w5"}, {"id": "b", "text": " w6", **own}]
    path = tmp_path / "targets.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "chat.json"
    config.write_text(json.dumps({"data": {"template": messages}}))
    flags = ["--config", config, "--data.lm", chat_folder, "--data.targets", "File"]
    flags += ["--data.targets.path", path, "--trainer.accelerator", "cpu", "--model.method", "DLMI"]
    flags += ["--model.prompt_length", "4", "--model.steps", "3"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    [results] = tmp_path.rglob("results.jsonl")
    first, second = read_rows(results)
    assert first.full_text == f"w9 w10 w11 w2 w1 w12 {first.prompt_text} w13 w2 w3"
    assert second.full_text == f"w14 {second.prompt_text}"
    assert json.loads(first.context.template) == messages
    assert (first.context.chat, second.context.chat) == (True, False)
    assert run("verify", results) == 0
    capsys.readouterr()

    def chats():
        return data(lm=chat_folder, file=path, template=messages)

    expected = fit(make_inverter("dlmi"), chats())
    rows = stop_and_resume(lambda: make_inverter("dlmi"), chats, fit, tmp_path / "run")
    assert comparable(rows) == comparable(expected)


def test_no_chat_template_no_chat(data, fit):
    with pytest.raises(InputError, match="chat template"):
        fit(Inverter(DLMI(), **SMALL), data(chat=True))


# ---- runs


def test_generated_targets_may_have_a_template_but_no_fields(data, fit):
    rows = fit(Inverter(DLMI(), **SMALL), data(template="w1 {slot} w2"))
    assert {row.full_ids[0] for row in rows.values()} == {4}
    with pytest.raises(InputError, match="File or Questions"):
        data(template="{question} {slot}")


def test_lengths_are_checked_with_the_template(data, fit):
    with pytest.raises(InputError, match="hold `model.prompt_length`"):
        fit(Inverter(DLMI(), **SMALL), data(template="w1 {slot:4}"))
    with pytest.raises(InputError, match="template . target length"):
        fit(Inverter(DLMI(), **SMALL), data(template="w1 " * 60 + "{slot}"))
    with pytest.raises(InputError, match="prompt_bos"):
        fit(Inverter(DLMI(), **SMALL, prompt_bos=True), data(template="<bos> {slot}"))


def test_verify_reads_the_whole_prompt_and_notices_a_lie(model_folder, questions, tmp_path, capsys):
    flags = ["--data.lm", model_folder(), "--data.targets", "File"]
    flags += ["--data.targets.path", questions["file"], "--data.template", TEMPLATE]
    flags += ["--trainer.accelerator", "cpu", "--model.method", "DLMI"]
    flags += ["--model.prompt_length", "4", "--model.steps", "3"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    [results] = tmp_path.rglob("results.jsonl")
    assert run("verify", results) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for change in ({"full_text": "w1"}, {"full_ids": [4]}, {"context": None}):
        lie = {**rows[0], **change}
        results.write_text(json.dumps(lie) + "\n")
        assert run("verify", results) == 1
    capsys.readouterr()


def test_invert_in_a_template(tiny):
    row = invert(tiny, " w4 w5", prompt_length=3, steps=4, template="w1 {slot} w2")
    assert row.full_text == f"w1 {row.prompt_text} w2"
    said = tiny.greedy(torch.tensor([row.full_ids]), 2)[0].tolist()
    assert list(row.output_ids) == said
    assert row.round_trips
    with pytest.raises(InputError, match="is a field"):
        invert(tiny, " w4", prompt_length=3, steps=1, template="{question} {slot}")


def test_the_shipped_config_fits_for_two_steps(model_folder, tmp_path):
    flags = ["--config", CONFIGS / "templates" / "hint.yaml", "--data.lm", model_folder()]
    flags += ["--model.steps", "2", "--model.method.topk", "8", "--trainer.accelerator", "cpu"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    assert len(read_rows(next(tmp_path.rglob("results.jsonl")))) == 2


# ---- the packaged LM


@pytest.mark.real
def test_the_packaged_lm_in_a_chat_and_in_a_template():
    lm = load_lm()
    chat = Template("What is the capital of {country}?{slot}", chat=True)
    plain = Template("Question: {country}?\nHint:{slot}\nAnswer:")
    targets = []
    for number, (template, text) in enumerate([(chat, "Rome."), (plain, " Rome.")]):
        filled = template.fill(lm, {"country": "Italy"}, "line 1")
        ids = filled.continuation_ids(lm, text, "line 1")
        assert ids == tuple(lm.encode(text))
        targets.append(Target.single(f"t{number}", ids, text, context=filled.context))
    prompt_ids = torch.tensor([lm.encode(" Think of pizza")] * 2)
    evaluations = evaluate(lm, prompt_ids, targets, [0, 0])
    for target, evaluation in zip(targets, evaluations, strict=True):
        full_ids = target.examples[0].context.text_ids(evaluation.prompt_ids)
        text = lm.decode(full_ids)
        assert " Think of pizza" in text
        assert lm.encode(text) == list(full_ids)
        log_q = lm.token_log_probs(torch.tensor([[*full_ids, *target.ids]]))[0, -len(target.ids) :]
        assert evaluation.discrete_loss == pytest.approx(float(-log_q.mean()), rel=1e-3)
    assert "<|im_start|>assistant\n" in lm.decode(targets[0].examples[0].context.pieces[1])
    spaced, close = (Template(t).fill(lm, {}, "line 1") for t in ("Hint: {slot}", "Hint:{slot}"))
    assert spaced.context.pieces == close.context.pieces
    with pytest.raises(InputError, match="Move a space"):
        Template("Hint:{slot} A: ").fill(lm, {}, "").continuation_ids(lm, "Rome", "line 1")
