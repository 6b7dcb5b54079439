"""The two-stage loss: the answer after what the LM itself writes to the discrete prompt."""

import dataclasses
import json

import pytest
import torch
from conftest import SMALL
from test_cli import CONFIGS, run
from test_contracts import assert_same
from test_shared_prompts import assert_resumes

from dlmi import InputError, Target, TargetDataModule
from dlmi.callbacks.base import InversionCallback
from dlmi.candidates import score_candidates
from dlmi.evaluation import evaluate_prompts, pasted_lcs, read_alone
from dlmi.framed_targets import fingerprint_targets, share_head, share_prompt
from dlmi.frames import Frame, Reasoning
from dlmi.judge import Judge
from dlmi.methods import DLMI, GCG
from dlmi.metrics import lcs_ratio
from dlmi.passes import target_pass
from dlmi.prompt_engineering.decoding import end_ids
from dlmi.reasoning import tokens_to_write
from dlmi.results import Inversion, read_rows
from dlmi.slots import Slot
from dlmi.transfer import try_row

CPU = torch.device("cpu")
QUESTIONS = [
    {"question": "w1 w2 w3", "answer": "w3\n#### w4"},
    {"question": "w6", "answer": "w9 w7"},
    {"question": "w10 w11", "answer": "w1\n#### w12 w5"},
    {"question": "w1 w11", "answer": "w13"},
]
REASONING = Reasoning(6, "w20 w21", (23, 24))


def single(number, beginning, ids, reasoning=REASONING):
    return Target(f"t{number}", ids, "", frame=Frame(((3, *beginning), (7,)), reasoning=reasoning))


SINGLES = [
    single(0, (4, 5), (13, 14)),
    single(1, (), (16,)),
    single(2, (9,), (18, 19, 20)),
]
PROMPT = (9, 12, 5, 21)


@pytest.fixture
def two_stages(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return {
        "questions": str(path),
        "template": "w20 {question} {slot} w22",
        "shared": True,
        "examples_per_step": 2,
        "eval_examples": 3,
        "reasoning": "own",
        "reasoning_tokens": 5,
        "trigger": " w25 w26",
    }


def whole_logits(lm, ids):
    with torch.no_grad():
        return lm.model(input_ids=torch.tensor([ids])).logits[0]


def written_by_hand(lm, example, prompt_ids, bos_ids=()):
    """Reasoning by the model alone: no batch, no cache, a whole pass for each token."""
    ids = [*bos_ids, *example.frame.full_ids(prompt_ids)]
    said = []
    for _ in range(example.frame.reasoning.max_tokens):
        token_id = int(whole_logits(lm, [*ids, *said])[-1].argmax())
        if token_id in end_ids(lm):
            break
        said.append(token_id)
    return tuple(said)


def prefix_by_hand(lm, example, prompt_ids, bos_ids=()):
    said = written_by_hand(lm, example, prompt_ids, bos_ids)
    trigger_ids = example.frame.reasoning.trigger_ids
    return [*bos_ids, *example.frame.full_ids(prompt_ids), *said, *trigger_ids]


def loss_by_hand(lm, example, prompt_ids, bos_ids=()):
    prefix = prefix_by_hand(lm, example, prompt_ids, bos_ids)
    logits = whole_logits(lm, [*prefix, *example.ids])
    log_probs = logits.log_softmax(-1)[len(prefix) - 1 : -1]
    return -sum(float(log_probs[i, t]) for i, t in enumerate(example.ids)) / len(example.ids)


def answer_by_hand(lm, example, prompt_ids):
    ids = prefix_by_hand(lm, example, prompt_ids)
    start = len(ids)
    for _ in example.ids:
        ids.append(int(whole_logits(lm, ids)[-1].argmax()))
    return tuple(ids[start:])


def reasoned_slot(lm, prompt_ids=PROMPT, prompt_bos=False, targets=SINGLES):
    [target] = share_head([share_prompt(targets, per_step=2)])
    slot = Slot.open(0, target, 0, CPU)
    Judge(lm, prompt_bos).reason([slot], torch.tensor([prompt_ids]))
    return slot


# ---- the loss


@pytest.mark.parametrize("prompt_bos", [False, True])
def test_the_loss_is_that_of_the_answer_after_reasoning_written_by_hand(tiny, prompt_bos):
    slot = reasoned_slot(tiny, prompt_bos=prompt_bos)
    bos_ids = (tiny.bos_id,) if prompt_bos else ()
    unwritten = {e.id: e for e in slot.target.shared.pool}
    chosen = [unwritten[example.id] for example in slot.target_at().readings]
    assert len(chosen) == 2
    for example in chosen:
        said = written_by_hand(tiny, example, PROMPT, bos_ids)
        assert slot.reasoning[example.id] == said
    embeds = tiny.embed(torch.tensor(PROMPT))[None, None]
    losses, _ = target_pass(tiny, [slot], embeds, "cross_entropy", prompt_bos=prompt_bos)
    expected = sum(loss_by_hand(tiny, example, PROMPT, bos_ids) for example in chosen) / 2
    assert float(losses) == pytest.approx(expected, rel=1e-6)
    # The same from the search's own way to read many prompts.
    prompt_ids = torch.tensor(PROMPT)
    scored, _, _ = score_candidates(
        tiny, prompt_ids, prompt_ids[None], slot.target_at(), prompt_bos=prompt_bos
    )
    assert float(scored) == pytest.approx(expected, rel=1e-6)


def test_the_gradient_holds_the_reasoning_fixed(tiny):
    """Against autograd through the plain model, and against finite differences."""
    slot = reasoned_slot(tiny)
    embeds = tiny.embed(torch.tensor(PROMPT)).clone().requires_grad_()
    losses, _ = target_pass(tiny, [slot], embeds[None, None], "cross_entropy")
    [gradient] = torch.autograd.grad(losses.sum(), embeds)
    pool = {e.id: e for e in slot.target.shared.pool}
    examples = [pool[e.id] for e in slot.target_at().readings]
    prefixes = [prefix_by_hand(tiny, example, PROMPT) for example in examples]

    def plain_loss(prompt_embeds):
        total = 0.0
        for example, prefix in zip(examples, prefixes, strict=True):
            whole = tiny.embed(torch.tensor([*prefix, *example.ids])).clone()
            whole[example.frame.places(len(PROMPT))] = prompt_embeds
            logits = tiny.model(inputs_embeds=whole[None]).logits[0]
            wanted = torch.tensor(example.ids)
            answer_logits = logits[len(prefix) - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(answer_logits, wanted)
        return total / len(examples)

    [expected] = torch.autograd.grad(plain_loss(embeds), embeds)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    direction = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        # Norms and rotations of the tiny LM are float32 inside: no smaller step is of use.
        ends = [float(plain_loss(embeds + step * direction)) for step in (1e-3, -1e-3)]
    slope = float((gradient * direction).sum())
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=1e-3)


def test_reasoning_ends_with_eos_and_is_charged_as_read(tiny, monkeypatch):
    free = reasoned_slot(tiny)
    longest = max(free.reasoning.values(), key=len)
    assert len(longest) > 2
    monkeypatch.setattr("dlmi.prompt_engineering.decoding.end_ids", lambda lm: {longest[2]})
    slot = reasoned_slot(tiny)
    pool = {e.id: e for e in slot.target.shared.pool}
    expected = 0
    for name, said in slot.reasoning.items():
        assert longest[2] not in said
        # The whole prompt, and every token but one that nothing follows.
        read = len(said) if len(said) < REASONING.max_tokens else len(said) - 1
        expected += len(pool[name].frame.full_ids(PROMPT)) + read
        assert tokens_to_write(pool[name], said, len(PROMPT)) <= expected
    assert min(map(len, slot.reasoning.values())) <= 2
    assert slot.forward_tokens == expected > 0 == slot.backward_tokens


def test_the_same_prompt_is_reasoned_about_once(tiny):
    slot = reasoned_slot(tiny)
    first, paid = dict(slot.reasoning), slot.forward_tokens
    judge = Judge(tiny, prompt_bos=False)
    judge.reason([slot], torch.tensor([PROMPT]))
    assert (slot.reasoning, slot.forward_tokens) == (first, paid)
    slot.step = 1  # one of its two examples is new
    judge.reason([slot], torch.tensor([PROMPT]))
    assert len(slot.reasoning) == 3
    assert first.items() <= slot.reasoning.items()
    judge.reason([slot], torch.tensor([PROMPT[::-1]]))
    assert slot.reasoned_ids == PROMPT[::-1]
    assert slot.reasoning.keys() == {e.id for e in slot.target_at(1).readings}
    again = Slot.from_state(slot.state(), {slot.target.id: slot.target}, CPU)
    assert (again.reasoning, again.reasoned_ids) == (slot.reasoning, slot.reasoned_ids)


def test_batch_mates_do_not_matter(tiny):
    [one, other] = share_head(
        [share_prompt(SINGLES, per_step=2), dataclasses.replace(SINGLES[2], id="other")]
    )
    together = [Slot.open(i, target, 0, CPU) for i, target in enumerate([one, other])]
    prompts = torch.tensor([PROMPT, PROMPT[::-1]])
    Judge(tiny, prompt_bos=False).reason(together, prompts)
    for slot, row in zip(together, prompts, strict=True):
        alone = Slot.open(0, slot.target, 0, CPU)
        Judge(tiny, prompt_bos=False).reason([alone], row[None])
        assert (alone.reasoning, alone.forward_tokens) == (slot.reasoning, slot.forward_tokens)


def test_examples_without_their_reasoning_are_not_read(tiny):
    [target] = share_head([share_prompt(SINGLES, per_step=2)])
    slot = Slot.open(0, target, 0, CPU)
    embeds = tiny.embed(torch.tensor(PROMPT))[None, None]
    with pytest.raises(RuntimeError, match="not been written"):
        target_pass(tiny, [slot], embeds, "cross_entropy")
    prompt_ids = torch.tensor(PROMPT)
    with pytest.raises(RuntimeError, match="not been written"):
        score_candidates(tiny, prompt_ids, prompt_ids[None], slot.target_at())


# ---- evaluation


def test_evaluations_go_through_the_same_two_stages(tiny):
    [target] = share_head([share_prompt(SINGLES, per_step=2)])
    prompt_ids = torch.randint(3, 30, (3, 4), generator=torch.Generator().manual_seed(3))
    evaluations = evaluate_prompts(tiny, prompt_ids, [target] * 3, [0] * 3)
    for row, evaluation in zip(prompt_ids.tolist(), evaluations, strict=True):
        said = [answer_by_hand(tiny, example, row) for example in target.readings]
        assert evaluation.output_ids == tuple(i for ids in said for i in ids)
        reasoning = tuple(written_by_hand(tiny, example, row) for example in target.readings)
        assert evaluation.reasoning_ids == reasoning
        pairs = list(zip(target.readings, said, strict=True))
        lcs = sum(lcs_ratio(example.ids, ids) for example, ids in pairs) / 3
        assert evaluation.lcs == pytest.approx(lcs)
        assert pasted_lcs(tiny, row, target, prompt_bos=False) == pytest.approx(lcs)
        loss = sum(loss_by_hand(tiny, example, row) for example in target.readings) / 3
        assert evaluation.discrete_loss == pytest.approx(loss, rel=1e-6)
        alone = read_alone(tiny, row, target, prompt_bos=False)
        assert (alone[0], alone[2]) == (evaluation.output_ids, reasoning)


def test_reasoning_is_part_of_what_makes_a_run():
    longer = dataclasses.replace(REASONING, max_tokens=7)
    prints = {
        fingerprint_targets([share_prompt([single(0, (4,), (13,), kind)], 1)])
        for kind in (None, REASONING, longer)
    }
    assert len(prints) == 3


def test_the_longest_row_has_room_for_the_reasoning(data, fit, two_stages):
    assert SINGLES[0].longest_row(5) == 5 + 4 + 6 + 2 + 2
    with pytest.raises(InputError, match="at most 64"):
        fit(DLMI(**SMALL), data(**{**two_stages, "reasoning_tokens": 60}))


# ---- runs


def test_every_method_learns_through_reasoning(make_shared_method, data, fit, two_stages):
    targets = data(**two_stages)
    [row] = fit(make_shared_method(), targets).values()
    lm = targets.lm
    assert row.target_text == " w4\n w9 w7\n w12 w5"
    for example in row.examples:
        ids = lm.encode(example.full_text)
        said = []
        for _ in range(5):
            token_id = int(whole_logits(lm, [*ids, *said])[-1].argmax())
            if token_id in end_ids(lm):
                break
            said.append(token_id)
        assert tuple(said) == example.reasoning_ids
        assert example.reasoning_text == lm.decode(said)
        ids = torch.tensor([[*ids, *said, *lm.encode("w25 w26")]])
        assert tuple(lm.greedy(ids, len(example.ids))[0].tolist()) == example.output_ids
    assert row.lcs == pytest.approx(sum(e.lcs for e in row.examples) / 3)
    assert row.lcs == row.lcs_matrix["best_so_far"]["free_greedy"] == row.round_trip_lcs
    assert Inversion.from_json(json.loads(row.to_json_line())) == row
    tried = try_row(lm, row)
    assert (tried.lcs, tried.text_lcs) == (row.lcs, row.round_trip_lcs)
    assert try_row(lm, row, as_text=True).text_lcs == row.round_trip_lcs


class StepLossByHand(InversionCallback):
    """Before each step of GCG, what its loss is to be."""

    def __init__(self):
        super().__init__()
        self.pairs = []

    def on_step_start(self, trainer, module, slots):
        [slot] = slots
        [prompt_ids] = module.prompt_ids(slots).tolist()
        pool = {e.id: e for e in slot.target.shared.pool}
        examples = [pool[e.id] for e in slot.target_at().readings]
        losses = [loss_by_hand(module.lm, example, prompt_ids) for example in examples]
        self.pairs.append([sum(losses) / len(losses), None])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.pairs[-1][1] = float(pl_module.slots[0].loss)


def test_each_step_of_a_run_reasons_with_the_prompt_of_that_step(data, fit, two_stages):
    by_hand = StepLossByHand()
    [row] = fit(
        GCG(**SMALL, search_width=16, topk=8, buffer_size=0),
        data(**two_stages),
        callbacks=[by_hand],
    ).values()
    assert len(by_hand.pairs) == row.steps > 5
    for expected, loss in by_hand.pairs:
        assert loss == pytest.approx(expected, rel=1e-5)


def test_resume_goes_on_with_the_reasoning_it_had(
    make_shared_method, data, fit, two_stages, tmp_path
):
    assert_resumes(make_shared_method, lambda: data(**two_stages), fit, tmp_path / "run")


def test_rows_per_pass_changes_no_result(data, fit, two_stages):
    for method in (DLMI(**SMALL, tau0=1.0, num_samples=2), GCG(**SMALL, search_width=8, topk=4)):
        assert_same(
            fit(type(method)(**method.hparams), data(**two_stages, rows_per_pass=1)),
            fit(method, data(**two_stages)),
        )


def test_the_loss_of_the_answers_falls(data, fit, two_stages):
    options = {**two_stages, "eval_examples": None, "examples_per_step": 4}
    method = DLMI(5, steps=150, eval_every=10, tau0=1.0, num_samples=4, lr=0.3)
    [row] = fit(method, data(**options)).values()
    first, *later = [point.discrete_loss for point in row.trace]
    assert min(later) < 0.8 * first


def test_the_shipped_config_from_fit_to_score(model_folder, two_stages, tmp_path, capsys):
    """The last line of `fit` is a command that runs as it stands."""
    flags = ["--config", CONFIGS / "prompt_engineering" / "sums_two_stages.yaml"]
    flags += ["--data.lm", model_folder(), "--data.chat", "false", "--model.steps", "3"]
    flags += ["--data.questions", two_stages["questions"], "--trainer.accelerator", "cpu"]
    flags += ["--data.template", "{question} {slot}", "--data.reasoning_tokens", "5"]
    flags += ["--data.trigger", "\\nw25", "--data.answer", " {final}", "--data.dtype", "float64"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    hint = capsys.readouterr().out.strip().splitlines()[-1]
    assert hint.startswith("how many questions it answers: python -m dlmi score --results ")
    [results] = tmp_path.rglob("results.jsonl")
    assert hint.endswith(
        f"--results {results.parent} --lm {model_folder()} --dtype float64 "
        "--examples OTHER_QUESTIONS.jsonl --template '{question} {slot}' --chat false "
        "--two_stages true --max_reasoning_tokens 5 --trigger '\\nw25'"
    )
    assert run("verify", results) == 0
    score = ["--results", results.parent, "--lm", model_folder(), "--dtype", "float64"]
    score += ["--examples", two_stages["questions"], "--template", "{question} {slot}"]
    score += ["--chat", "false", "--two_stages", "true", "--max_reasoning_tokens", "5"]
    score += ["--trigger", "\\nw25", "--out", tmp_path / "scores.json", "--draws", "1"]
    assert run("score", *score) == 0
    [row] = read_rows(results)
    answered = json.loads((tmp_path / "scores.json").read_text())["scores"][-1]["answered"]
    for example, answer in zip(row.examples, answered, strict=False):
        assert answer["output_text"].startswith(f"{example.reasoning_text}\nw25")
    line = json.loads(results.read_text())
    lie = {**line, "examples": [{**line["examples"][0], "reasoning_ids": [5]}]}
    results.write_text(json.dumps({**lie, "examples": [*lie["examples"], *line["examples"][1:]]}))
    assert run("verify", results) == 1
    capsys.readouterr()


def test_settings_that_do_not_go_together_are_refused(data, two_stages, tmp_path):
    with pytest.raises(InputError, match=r"data\.questions"):
        data(reasoning="own")
    with pytest.raises(InputError, match="reasoning_tokens"):
        data(**{**two_stages, "reasoning_tokens": 0})
    with pytest.raises(InputError, match="held_out_file"):
        data(**two_stages, held_out_file=str(tmp_path / "x.jsonl"))
    with pytest.raises(InputError, match="at least 1 token"):
        Reasoning(0, "", ())
    with pytest.raises(InputError, match=r"end of `data\.trigger`"):
        data(**two_stages, answer="{final}").load()  # "w26" and "w4" would be one word
    answers = data(**two_stages, answer=" w2 {final} w3")
    answers.load()
    assert answers.targets[0].examples[0].text == " w2 w4 w3"


@pytest.mark.real
def test_the_packaged_model_reasons_about_packaged_questions():
    """Words before the answer, and the loss that the model itself gives by hand."""
    data = TargetDataModule(
        questions="sums",
        max_questions=2,
        template="{question}{slot}",
        chat=True,
        shared=True,
        reasoning="own",
        reasoning_tokens=12,
        trigger="\\n#### ",
        answer="{final}",
    )
    data.load()
    lm, [target] = data.lm, data.targets
    prompt_ids = tuple(lm.encode(" Answer in one short sentence."))
    slot = Slot.open(0, target, 0, CPU)
    Judge(lm, prompt_bos=False).reason([slot], torch.tensor([prompt_ids]))
    assert all(len(lm.decode(said).split()) > 3 for said in slot.reasoning.values())
    embeds = lm.embed(torch.tensor(prompt_ids))[None, None]
    losses, _ = target_pass(lm, [slot], embeds, "cross_entropy")
    expected = sum(loss_by_hand(lm, example, prompt_ids) for example in target.readings) / 2
    assert float(losses) == pytest.approx(expected, rel=1e-3)
