"""Fixed tokens around the learned ones: layout, templates, and every method in them."""

import itertools
import json

import pytest
import torch
from conftest import KINDS, SMALL, make_tokenizer
from test_cli import CONFIGS, run
from test_contracts import StopAfter, assert_same, comparable
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlmi import InputError, Target, invert, load_lm
from dlmi.callbacks import ResultWriter, RunCheckpoint
from dlmi.candidates import score_candidates
from dlmi.evaluation import evaluate_prompts
from dlmi.framed_targets import fingerprint_targets, share_head
from dlmi.frames import Frame
from dlmi.layouts import lay_out
from dlmi.losses import target_loss
from dlmi.memory import RowsPerPass
from dlmi.methods import DLMI, GCG
from dlmi.passes import target_pass
from dlmi.results import read_rows
from dlmi.round_trip import mend_prompts, round_trips
from dlmi.slots import Slot
from dlmi.targets import read_targets, write_targets
from dlmi.templates import Template
from dlmi.vocabulary import Vocabulary

CPU = torch.device("cpu")
N = 5
# Beginnings that are partly shared, pieces of different number of tokens, one and two slots.
FRAMES = [
    Frame(((3, 4, 5), (6,))),
    Frame(((3, 4), ())),
    Frame(((3, 4, 9, 8), (7, 7), (10, 11, 12)), (2, 0)),
    Frame(((3, 4, 5), (6, 8), ()), (0, 0)),
    Frame(),
]
TARGETS = [(13, 14, 15), (16, 17), (18,), (19, 20, 21, 22), (23, 24)]


def framed_targets(frames=FRAMES):
    pairs = zip(frames, TARGETS, strict=False)
    targets = [Target(f"t{i}", ids, "", frame=f) for i, (f, ids) in enumerate(pairs)]
    return share_head(targets)


def by_hand(lm, frame, prompt_embeds, target_ids, prompt_bos):
    """Logits at the target of one whole prompt: the model itself, no cache, no padding."""
    parts, learned = [], iter(prompt_embeds)
    if prompt_bos:
        parts.append(lm.embed(torch.tensor([lm.bos_id])))
    for piece, size in zip(frame.pieces, (*frame.sizes(len(prompt_embeds)), 0), strict=True):
        parts.append(lm.embed(torch.tensor(piece, dtype=torch.int64)))
        parts += [next(learned)[None] for _ in range(size)]
    inputs = torch.cat([*parts, lm.embed(torch.tensor(target_ids[:-1], dtype=torch.int64))])
    logits = lm.model(inputs_embeds=inputs[None]).logits[0, -len(target_ids) :]
    return logits, torch.cat(parts)


# ---- frames


def test_full_ids_places_and_sizes_agree():
    for frame, length in itertools.product(FRAMES, (3, 5, 8)):
        prompt_ids = list(range(100, 100 + length))
        full_ids = frame.full_ids(prompt_ids)
        assert [full_ids[place] for place in frame.places(length)] == prompt_ids
        assert len(full_ids) == length + len(frame.fixed_ids)
        assert sum(frame.sizes(length)) == length


@pytest.mark.parametrize(
    ("lengths", "prompt_length"), [((3,), 5), ((3, 4), 6), ((3, 0), 3), ((0, 0), 1), ((6,), 5)]
)
def test_slots_that_cannot_hold_the_prompt_are_refused(lengths, prompt_length):
    frame = Frame(((),) * (len(lengths) + 1), lengths)
    with pytest.raises(InputError, match="model.prompt_length"):
        frame.sizes(prompt_length)


def test_what_is_no_frame_is_refused():
    for options in ({"pieces": ((),)}, {"slot_lengths": (-1,)}, {"head": 1}):
        with pytest.raises(InputError, match="frame"):
            Frame(**options)


# ---- passes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_pass", [2, "auto"])
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_losses_and_gradients_are_those_of_whole_prompts(
    kind, rows_per_pass, prompt_bos, model_folder
):
    lm = load_lm(str(model_folder(kind)), dtype="float64", bos="<eos>")
    lm.rows_per_pass = RowsPerPass(rows_per_pass)
    torch.manual_seed(0)
    for frames in (FRAMES, FRAMES[:1] * 2, FRAMES[:2], FRAMES[4:] * 2):
        targets = framed_targets(frames)
        slots = [Slot.open(0, target, 0, CPU) for target in targets]
        ids = torch.randint(3, 30, (len(slots), 2, N))
        embeds = lm.embed(ids).clone().requires_grad_()
        losses, output_ids = target_pass(lm, slots, embeds, "cross_entropy", True, prompt_bos)
        weights = torch.rand(losses.shape, dtype=torch.float64)
        [gradient] = torch.autograd.grad((losses * weights).sum(), embeds)
        expected = torch.zeros_like(losses)
        for b, s in itertools.product(range(len(slots)), range(2)):
            target = targets[b]
            logits, _ = by_hand(lm, target.frame, embeds[b, s], target.ids, prompt_bos)
            wanted = torch.tensor([target.ids])
            mask = torch.ones_like(wanted, dtype=torch.bool)
            expected[b, s] = target_loss("cross_entropy", logits[None], wanted, mask)[0]
            length = len(target.ids)
            assert torch.equal(output_ids[b, s, :length], logits.argmax(-1))
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        [by_whole] = torch.autograd.grad((expected * weights).sum(), embeds)
        torch.testing.assert_close(gradient, by_whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_free_runs_and_evaluations_are_those_of_whole_prompts(kind, prompt_bos, model_folder):
    lm = load_lm(str(model_folder(kind)), dtype="float64", bos="<eos>")
    lm.rows_per_pass = RowsPerPass(3)
    targets = framed_targets()
    prompt_ids = torch.randint(3, 30, (len(targets), N), generator=torch.Generator().manual_seed(1))
    evaluations = evaluate_prompts(lm, prompt_ids, targets, [0] * len(targets), prompt_bos)
    slots = [Slot.open(0, target, 0, CPU) for target in targets]
    embeds = lm.embed(prompt_ids)[:, None]
    _, free_ids = target_pass(lm, slots, embeds, "cross_entropy", False, prompt_bos)
    for row, target in enumerate(targets):
        full_ids = [*[lm.bos_id] * prompt_bos, *target.frame.full_ids(prompt_ids[row].tolist())]
        said = lm.greedy(torch.tensor([full_ids]), len(target.ids))[0]
        assert evaluations[row].output_ids == tuple(said.tolist())
        assert torch.equal(free_ids[row, 0, : len(target.ids)], said)
        logits, _ = by_hand(lm, target.frame, embeds[row, 0], target.ids, prompt_bos)
        log_q = logits.log_softmax(-1)[range(len(target.ids)), target.ids]
        assert evaluations[row].discrete_loss == pytest.approx(float(-log_q.mean()), rel=1e-5)


def test_the_head_runs_on_each_rows_own_target_alone(tiny, monkeypatch):
    """Neither the fixed tokens nor the spread of their number make logits that nobody needs."""
    seen = []
    handle = tiny.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(output.shape[:2]))
    )
    targets = framed_targets()
    layout = lay_out(tiny, [t.readings[0] for t in targets], N, prompt_bos=False)
    layout.forced(tiny, tiny.embed(torch.randint(3, 30, (5, N))), slice(0, 5))
    handle.remove()
    assert seen[-1] == (5, 4)  # the longest target


def test_a_shared_beginning_is_read_once_and_paid_for_by_nobody(tiny):
    targets = framed_targets(FRAMES[:4])
    assert {target.frame.head for target in targets} == {2}
    slot = Slot.open(0, targets[0], 0, CPU)
    target_pass(tiny, [slot], tiny.embed(torch.zeros(1, 1, N, dtype=torch.int64)), "cross_entropy")
    fixed, beginning = 4, 2
    assert slot.forward_tokens == N + fixed - beginning + len(targets[0].ids) - 1


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("frame", FRAMES)
def test_candidates_are_scored_in_their_frames(kind, frame, model_folder):
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    [target] = framed_targets([frame])
    prompt_ids = torch.randint(3, 30, (N,), generator=torch.Generator().manual_seed(0))
    candidate_ids = prompt_ids.repeat(7, 1)
    for row in range(1, 7):
        candidate_ids[row, row % N] = row + 2
    losses, output_ids, _ = score_candidates(lm, prompt_ids, candidate_ids, target)
    whole = evaluate_prompts(lm, candidate_ids, [target] * 7, [0] * 7)
    expected = torch.tensor([e.discrete_loss for e in whole], dtype=torch.float64)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-9)
    assert output_ids[:, 0].tolist() == [e.output_ids[0] for e in whole]


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
    return {"targets_file": str(path), "template": TEMPLATE}


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
        assert row.frame.template == TEMPLATE
        wanted = torch.tensor([[*row.full_ids, *row.target_ids]])
        log_q = lm.token_log_probs(wanted)[0, -len(row.target_ids) :]
        assert row.discrete_loss == pytest.approx(float(-log_q.mean()), rel=1e-5)
        assert row.lcs == row.lcs_matrix["best_so_far"]["free_greedy"] == row.round_trip_lcs
        empty = lm.encode(f"w20 {line['question']} w21 w22")
        said = lm.greedy(torch.tensor([empty]), len(row.target_ids))[0].tolist()
        exact = row.lcs_matrix["no_prompt"]["free_greedy"] == 1
        assert exact == (said == list(row.target_ids))


def test_batch_mates_do_not_matter_in_a_template(make_framed_method, data, fit, questions):
    alone = fit(make_framed_method(), data(**questions, batch_size=1))
    assert_same(fit(make_framed_method(), data(**questions, batch_size=3)), alone)


def test_resume_in_a_template(make_framed_method, data, fit, questions, tmp_path):
    expected = fit(make_framed_method(), data(**questions))
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run"}
    callbacks = [ResultWriter(), RunCheckpoint()]
    fit(make_framed_method(), data(**questions), callbacks=[*callbacks, StopAfter(5)], **options)
    fit(
        make_framed_method(),
        data(**questions),
        ckpt_path=tmp_path / "run" / "checkpoints" / "last.ckpt",
        callbacks=[ResultWriter(), RunCheckpoint()],
        **options,
    )
    rows = {row.target_id: row for row in read_rows(tmp_path / "run")}
    assert comparable(rows) == comparable(expected)


def test_another_template_is_another_run(data, fit, questions, tmp_path):
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run"}
    fit(DLMI(**SMALL), data(**questions), callbacks=[StopAfter(5), RunCheckpoint()], **options)
    other = {**questions, "template": TEMPLATE.replace("w21", "w23")}
    with pytest.raises(InputError, match="targets"):
        fit(
            DLMI(**SMALL),
            data(**other),
            ckpt_path=tmp_path / "run" / "checkpoints" / "last.ckpt",
            **options,
        )


def test_plain_targets_keep_their_fingerprint():
    targets = [Target("a", (1, 2), ""), Target("b", (3,), "")]
    assert fingerprint_targets(targets) == "f81755a7dfa7667f"
    framed = framed_targets()[:1]
    assert fingerprint_targets(framed) != fingerprint_targets([Target("t0", TARGETS[0], "")])


def test_targets_in_frames_survive_a_file(tiny, tmp_path):
    targets = framed_targets()
    write_targets(tmp_path / "t.jsonl", targets)
    assert read_targets(tiny, tmp_path / "t.jsonl") == targets


# ---- templates and tokens


@pytest.fixture(scope="module")
def gpt(model_folder, tmp_path_factory):
    """The tiny Llama with a tokenizer that reads spaces as GPT-2 does, and merges nothing else."""
    letters = [*"xabcQA:.\n<|>", "Ġ"]
    names = [letter.replace("\n", "Ċ") for letter in letters]
    pieces = ["<unk>", "<eos>", "<bos>", *names, *(f"Ġ{letter}" for letter in "xabc"), "ĊĊ"]
    merges = [*(("Ġ", letter) for letter in "xabc"), ("Ċ", "Ċ")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lm = load_lm(str(model_folder()), dtype="float64")
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    lm.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return lm


def test_pieces_are_read_as_in_the_final_text(gpt):
    filled = Template("Q: {q}\nA:{slot} b\n{slot:2}:").fill(gpt, {"q": "abc"}, "line 1")
    assert filled.frame.pieces == tuple(
        tuple(gpt.encode(text)) for text in ("Q: abc\nA:", " b\n", ":")
    )
    assert filled.frame.slot_lengths == (0, 2)
    full_ids = filled.frame.full_ids([*gpt.encode(" x a"), *gpt.encode("x c")])
    assert gpt.encode("Q: abc\nA: x a b\nx c:") == list(full_ids)


@pytest.mark.parametrize(
    ("template", "target", "told"),
    [
        ("Q: {slot}\nA:", " a", "no ' ' before `{slot}`"),
        ("Q:{slot}\nA: ", "a", "Move a space"),
        ("Q:{slot}\n", "\n\na", "Move a space or a new line"),
    ],
)
def test_what_cannot_keep_its_tokens_is_refused(gpt, template, target, told):
    with pytest.raises(InputError, match=told):
        Template(template).fill(gpt, {}, "line 1").continuation_ids(gpt, target, "line 1")


def test_a_target_has_the_tokens_that_follow_the_template(gpt):
    filled = Template("Q:{slot}\nA:").fill(gpt, {}, "line 1")
    assert filled.continuation_ids(gpt, " abc", "") == tuple(gpt.encode(" abc"))


@pytest.mark.parametrize(
    "template", ["no place", "{slot} {", "{slot} }", "{slot:0}", "{slot} {name:3}", "{slot} { a }"]
)
def test_what_is_no_template_is_refused(template):
    with pytest.raises(InputError, match="data.template"):
        Template(template)


def test_braces_and_fields(tiny):
    filled = Template("w1 {{w2}} {n} {slot}").fill(tiny, {"n": 3}, "")
    assert filled.frame.pieces == ((4, *tiny.encode("{w2}"), *tiny.encode("3")), ())
    for values in ({}, {"n": None}, {"n": ["w1"]}):
        with pytest.raises(InputError, match="line 7 to have a text as `n`"):
            Template("{n} {slot}").fill(tiny, values, "line 7")


def test_prompts_are_mended_together_with_what_is_around_them(gpt):
    """A space at the end of the slot would go to the letter after it."""
    frame = Template("Q:{slot}a").fill(gpt, {}, "").frame
    slot = Slot.open(0, Target("t", (4,), "", frame=frame), 0, CPU)
    prompt_ids = torch.tensor([gpt.encode("x ")])
    assert round_trips(gpt, prompt_ids[0].tolist())
    assert not round_trips(gpt, prompt_ids[0].tolist(), slot.target)
    mended = mend_prompts(Vocabulary(gpt, ["no_special"]), slot, prompt_ids, lambda: None)
    assert round_trips(gpt, mended[0].tolist(), slot.target)


def test_gcg_keeps_to_prompts_that_survive_in_their_template(data, fit, questions):
    rows = fit(
        GCG(**SMALL, search_width=16, topk=8, allowed_tokens="round_trip"), data(**questions)
    )
    assert all(row.round_trips for row in rows.values())


# ---- chats


def test_a_chat_is_what_the_tokenizer_makes_of_the_message(data, fit, model_folder, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
        "{% if add_generation_prompt %}w3{% endif %}"
    )
    folder = tmp_path / "chat"
    load_lm(str(model_folder()), dtype="float64").model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = fit(DLMI(**SMALL), data(lm=str(folder), chat=True, texts=[" w4 w5"]))
    [row] = rows.values()
    assert row.full_text == f"w1 {row.prompt_text} w2 w3"
    assert row.frame.chat
    assert row.frame.template == "{slot}"


def test_no_chat_template_no_chat(data, fit):
    with pytest.raises(InputError, match="chat template"):
        fit(DLMI(**SMALL), data(chat=True))


# ---- runs


def test_generated_targets_may_have_a_template_but_no_fields(data, fit):
    rows = fit(DLMI(**SMALL), data(template="w1 {slot} w2"))
    assert {row.full_ids[0] for row in rows.values()} == {4}
    with pytest.raises(InputError, match="data.targets_file"):
        data(template="{question} {slot}")


def test_lengths_are_checked_with_the_template(data, fit):
    with pytest.raises(InputError, match="hold `model.prompt_length`"):
        fit(DLMI(**SMALL), data(template="w1 {slot:4}"))
    with pytest.raises(InputError, match="template . target length"):
        fit(DLMI(**SMALL), data(template="w1 " * 60 + "{slot}"))
    with pytest.raises(InputError, match="prompt_bos"):
        fit(DLMI(**SMALL, prompt_bos=True), data(template="<bos> {slot}"))


def test_verify_reads_the_whole_prompt_and_notices_a_lie(model_folder, questions, tmp_path, capsys):
    flags = ["--data.lm", model_folder(), "--data.targets_file", questions["targets_file"]]
    flags += ["--data.template", TEMPLATE, "--trainer.accelerator", "cpu", "--model", "DLMI"]
    flags += ["--model.prompt_length", "4", "--model.steps", "3"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    [results] = tmp_path.rglob("results.jsonl")
    assert run("verify", results) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for change in ({"full_text": "w1"}, {"full_ids": [4]}, {"frame": None}):
        lie = {**rows[0], **change}
        results.write_text(json.dumps(lie) + "\n")
        assert run("verify", results) == 1
    capsys.readouterr()


def test_invert_in_a_template(tiny):
    found = invert(tiny, " w4 w5", prompt_length=3, steps=4, template="w1 {slot} w2")
    assert found.row.full_text == f"w1 {found.prompt_text} w2"
    said = tiny.greedy(torch.tensor([found.row.full_ids]), 2)[0].tolist()
    assert list(found.output_ids) == list(found.pasted_output_ids) == said
    assert found.to_json()["full_text"] == found.row.full_text
    with pytest.raises(InputError, match="is a field"):
        invert(tiny, " w4", prompt_length=3, steps=1, template="{question} {slot}")


@pytest.mark.parametrize("name", ["hint.yaml"])
def test_shipped_configs_fit_for_two_steps(name, model_folder, tmp_path):
    flags = ["--config", CONFIGS / "templates" / name, "--data.lm", model_folder()]
    flags += ["--model.steps", "2", "--model.topk", "8", "--trainer.accelerator", "cpu"]
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
        targets.append(Target(f"t{number}", ids, text, frame=filled.frame))
    prompt_ids = torch.tensor([lm.encode(" Think of pizza")] * 2)
    evaluations = evaluate_prompts(lm, prompt_ids, targets, [0, 0])
    for target, evaluation in zip(targets, evaluations, strict=True):
        full_ids = target.frame.full_ids(evaluation.prompt_ids)
        text = lm.decode(full_ids)
        assert " Think of pizza" in text
        assert lm.encode(text) == list(full_ids)
        log_q = lm.token_log_probs(torch.tensor([[*full_ids, *target.ids]]))[0, -len(target.ids) :]
        assert evaluation.discrete_loss == pytest.approx(float(-log_q.mean()), rel=1e-3)
    assert "<|im_start|>assistant\n" in lm.decode(targets[0].frame.pieces[1])
    with pytest.raises(InputError, match="before `{slot}`"):
        Template("Hint: {slot}").fill(lm, {}, "line 1")
    with pytest.raises(InputError, match="Move a space"):
        Template("Hint:{slot} A: ").fill(lm, {}, "").continuation_ids(lm, "Rome", "line 1")
