"""The two-stage loss: the answer after what the LM itself writes to the discrete prompt."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from helpers.command_line import CONFIGS, run
from helpers.methods import SMALL, make_inverter
from helpers.resuming import assert_resumes
from helpers.runs import assert_same
from helpers.slots import open_slot

from dlmi import InputError, Inverter, Target, TargetDataModule
from dlmi.jsonl import build
from dlmi.methods import DLMI, GCG
from dlmi.metrics import lcs_ratio
from dlmi.rows import Inversion, read_rows
from dlmi.run.budget import Budget, most_reasoned
from dlmi.run.callbacks.base import InversionCallback
from dlmi.run.slot_pool import SlotPool
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import evaluate, evaluate_alone, pasted_lcs
from dlmi.scoring.passes import Cost, Pass
from dlmi.scoring.reasoning import tokens_to_write
from dlmi.scoring.verification import try_row
from dlmi.targets.context import Context, Reasoning
from dlmi.targets.sources import Questions, Sharing
from dlmi.targets.target import fingerprint_targets, share_prefix, share_prompt, with_start_ids
from dlmi.tokens.vocabulary import Vocabulary

QUESTIONS = [
    {"question": "w1 w2 w3", "answer": "w3\n#### w4"},
    {"question": "w6", "answer": "w9 w7"},
    {"question": "w10 w11", "answer": "w1\n#### w12 w5"},
    {"question": "w1 w11", "answer": "w13"},
]
REASONING = Reasoning(6, "w20 w21", (23, 24))
OF_EACH_KIND = ("dlmi", "gcg", "swap_search_window", "soda_refined")


def single(number, beginning, ids, reasoning=REASONING):
    context = Context(((3, *beginning), (7,)), reasoning=reasoning)
    return Target.single(f"t{number}", ids, "", context)


SINGLES = [single(0, (4, 5), (13, 14)), single(1, (), (16,)), single(2, (9,), (18, 19, 20))]
PROMPT = (9, 12, 5, 21)


@pytest.fixture
def two_stages(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return {
        "targets": Questions(str(path), reasoning_tokens=5, trigger=" w25 w26"),
        "template": "w20 {question} {slot} w22",
        "share": Sharing(per_step=2, evaluated=3),
    }


def changed(two_stages, **options):
    return {**two_stages, "targets": dataclasses.replace(two_stages["targets"], **options)}


def whole_logits(lm, ids):
    with torch.no_grad():
        return lm.model(input_ids=torch.tensor([ids])).logits[0]


def greedy_by_hand(lm, ids, most, end_ids=()):
    """By the model alone: no batch, no cache, a whole pass for each token."""
    said = []
    for _ in range(most):
        token_id = int(whole_logits(lm, [*ids, *said])[-1].argmax())
        if token_id in end_ids:
            break
        said.append(token_id)
    return tuple(said)


def written_by_hand(lm, example, prompt_ids):
    ids = example.context.ids(prompt_ids)
    return greedy_by_hand(lm, ids, example.context.reasoning.max_tokens, lm.end_ids)


def prefix_by_hand(lm, example, prompt_ids):
    said = written_by_hand(lm, example, prompt_ids)
    return [*example.context.ids(prompt_ids), *said, *example.context.reasoning.trigger_ids]


def loss_by_hand(lm, example, prompt_ids):
    prefix = prefix_by_hand(lm, example, prompt_ids)
    logits = whole_logits(lm, [*prefix, *example.ids])
    log_probs = logits.log_softmax(-1)[len(prefix) - 1 : -1]
    return -sum(float(log_probs[i, t]) for i, t in enumerate(example.ids)) / len(example.ids)


def prepare(slot, lm, budget, prompt_ids=PROMPT):
    """Prepare a step of a method that stands for a given prompt."""
    method = SimpleNamespace(prompt_ids=lambda slot, state: torch.tensor(prompt_ids))
    pool = SlotPool(method, len(PROMPT))
    pool.engine, pool.budget = SimpleNamespace(lm=lm), budget
    return pool.prepare(slot)


def reason(lm, slot, prompt_ids=PROMPT):
    assert prepare(slot, lm, Budget(10), prompt_ids)


def new_slot(lm, prompt_bos=False):
    targets = with_start_ids([share_prompt(SINGLES, per_step=2)], [lm.bos_id] * prompt_bos)
    return open_slot(Vocabulary(lm), share_prefix(targets)[0], len(PROMPT))


def reasoned_slot(lm, prompt_bos=False):
    slot = new_slot(lm, prompt_bos)
    reason(lm, slot)
    return slot


def unwritten(slot):
    """The examples of its step, before the LM has reasoned."""
    return slot.target.minibatch(slot.step, slot.key)


# ---- the loss


@pytest.mark.parametrize("prompt_bos", [False, True])
def test_the_loss_is_that_of_the_answer_after_reasoning_written_by_hand(tiny, prompt_bos):
    slot = reasoned_slot(tiny, prompt_bos)
    examples = unwritten(slot)
    assert len(examples) == 2
    for example in examples:
        assert example.context.start_ids == (tiny.bos_id,) * prompt_bos
        assert slot.reasoning[example.id] == written_by_hand(tiny, example, PROMPT)
    expected = sum(loss_by_hand(tiny, example, PROMPT) for example in examples) / 2
    prompt_ids = torch.tensor(PROMPT)
    for scores in Engine(Vocabulary(tiny))(
        [
            Pass(tiny.embed(prompt_ids)[None], slot.examples),
            Pass(prompt_ids[None], slot.examples),
            Pass(prompt_ids[None], slot.examples, like_ids=prompt_ids),  # as searches read them
        ]
    ):
        assert float(scores.losses) == pytest.approx(expected, rel=1e-6)


def test_the_gradient_holds_the_reasoning_fixed(tiny):
    """Against autograd through the plain model, and against finite differences."""
    slot = reasoned_slot(tiny)
    embeds = tiny.embed(torch.tensor(PROMPT)).clone().requires_grad_()
    [scores] = Engine(Vocabulary(tiny))([Pass(embeds[None], slot.examples)])
    [gradient] = torch.autograd.grad(scores.losses.sum(), embeds)
    examples = unwritten(slot)
    prefixes = [prefix_by_hand(tiny, example, PROMPT) for example in examples]

    def plain_loss(prompt_embeds):
        total = 0.0
        for example, prefix in zip(examples, prefixes, strict=True):
            whole = tiny.embed(torch.tensor([*prefix, *example.ids])).clone()
            whole[example.context.positions(len(PROMPT))] = prompt_embeds
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
    longest = max(reasoned_slot(tiny).reasoning.values(), key=len)
    assert len(longest) > 2
    monkeypatch.setattr(tiny, "end_ids", [longest[2]])
    slot = reasoned_slot(tiny)
    expected = 0
    for example in unwritten(slot):
        said = slot.reasoning[example.id]
        assert longest[2] not in said
        # The whole prompt, and every token but one that nothing follows.
        read = len(said) if len(said) < REASONING.max_tokens else len(said) - 1
        cost = len(example.context.text_ids(PROMPT)) + read
        assert tokens_to_write(example, said, len(PROMPT)) == cost
        expected += cost
    assert min(map(len, slot.reasoning.values())) <= 2
    assert slot.cost == Cost(expected)


def test_the_same_prompt_is_reasoned_about_once(tiny):
    slot = reasoned_slot(tiny)
    first, paid = dict(slot.reasoning), slot.cost
    reason(tiny, slot)
    assert (slot.reasoning, slot.cost) == (first, paid)
    slot.step = 1  # one of its two examples is new
    reason(tiny, slot)
    assert len(slot.reasoning) == 3
    assert first.items() <= slot.reasoning.items()
    reason(tiny, slot, PROMPT[::-1])
    assert slot.reasoned_ids == PROMPT[::-1]
    assert slot.reasoning.keys() == {example.id for example in unwritten(slot)}


def test_reasoning_that_the_budget_does_not_cover_is_not_written(tiny):
    slot = new_slot(tiny)
    enough = Budget(10, 10**6)
    least = enough.reserve(slot) + most_reasoned(slot, slot.examples)
    assert not prepare(slot, tiny, Budget(10, least - 1))
    assert slot.is_spent
    assert (slot.reasoning, slot.cost) == ({}, Cost())
    assert prepare(slot, tiny, Budget(10, least))
    assert 0 < slot.cost.total <= most_reasoned(slot, unwritten(slot))


def test_examples_without_their_reasoning_are_not_read(tiny):
    engine, prompt_ids = Engine(Vocabulary(tiny)), torch.tensor(PROMPT)
    for like_ids in (None, prompt_ids):
        with pytest.raises(RuntimeError, match="not been written"):
            engine([Pass(prompt_ids[None], new_slot(tiny).examples, like_ids=like_ids)])


# ---- evaluation


def test_evaluations_go_through_the_same_two_stages(tiny):
    [target] = share_prefix([share_prompt(SINGLES, per_step=2)])
    prompt_ids = torch.randint(3, 30, (3, 4), generator=torch.Generator().manual_seed(3))
    evaluations = evaluate(tiny, prompt_ids, [target] * 3, [0] * 3)
    for row, evaluation in zip(prompt_ids.tolist(), evaluations, strict=True):
        said = [
            greedy_by_hand(tiny, prefix_by_hand(tiny, example, row), len(example.ids))
            for example in target.measured
        ]
        assert evaluation.output_ids == tuple(i for ids in said for i in ids)
        reasoning = tuple(written_by_hand(tiny, example, row) for example in target.measured)
        assert evaluation.reasoning_ids == reasoning
        pairs = list(zip(target.measured, said, strict=True))
        lcs = sum(lcs_ratio(example.ids, ids) for example, ids in pairs) / 3
        assert evaluation.lcs == pytest.approx(lcs)
        assert pasted_lcs(tiny, evaluation, target) == pytest.approx(lcs)
        loss = sum(loss_by_hand(tiny, example, row) for example in target.measured) / 3
        assert evaluation.discrete_loss == pytest.approx(loss, rel=1e-6)
        alone = evaluate_alone(tiny, row, target, 0)
        assert (alone.output_ids, alone.reasoning_ids) == (evaluation.output_ids, reasoning)


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
        fit(Inverter(DLMI(), **SMALL), data(**changed(two_stages, reasoning_tokens=60)))


# ---- runs


def test_every_method_learns_through_reasoning(make_shared_method, data, fit, two_stages):
    targets = data(**two_stages)
    [row] = fit(make_shared_method(), targets).values()
    lm = targets.lm
    assert row.target_text == " w4\n w9 w7\n w12 w5"
    for example in row.examples:
        ids = lm.encode(example.full_text)
        said = greedy_by_hand(lm, ids, 5, lm.end_ids)
        assert said == example.reasoning_ids
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
        prompt_ids = slot.state.prompt_ids.tolist()
        losses = [loss_by_hand(module.lm, example, prompt_ids) for example in unwritten(slot)]
        self.pairs.append([sum(losses) / len(losses), None])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.pairs[-1][1] = float(pl_module.slots[0].loss)


def test_each_step_of_a_run_reasons_with_the_prompt_of_that_step(data, fit, two_stages):
    by_hand = StepLossByHand()
    inverter = Inverter(GCG(search_width=16, topk=8, buffer_size=0), **SMALL)
    [row] = fit(inverter, data(**two_stages), callbacks=[by_hand]).values()
    assert len(by_hand.pairs) == row.steps > 5
    for expected, loss in by_hand.pairs:
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_resume_goes_on_with_the_reasoning_it_had(name, data, fit, two_stages, tmp_path):
    assert_resumes(lambda: make_inverter(name), lambda: data(**two_stages), fit, tmp_path / "run")


@pytest.mark.parametrize("name", ["dlmi", "gcg"])
def test_rows_per_pass_changes_no_result(name, data, fit, two_stages):
    expected = fit(make_inverter(name), data(**two_stages))
    assert_same(fit(make_inverter(name), data(**two_stages, rows_per_pass=1)), expected)


def test_batch_mates_do_not_matter(data, fit, two_stages):
    options = {**two_stages, "share": None}
    alone = fit(make_inverter("dlmi"), data(**options, batch_size=1))
    assert len(alone) == len(QUESTIONS)
    assert_same(fit(make_inverter("dlmi"), data(**options, batch_size=4)), alone)


def test_the_loss_of_the_answers_falls(data, fit, two_stages):
    options = {**two_stages, "share": Sharing(per_step=4, evaluated=None)}
    inverter = Inverter(DLMI(tau0=1.0, num_samples=4, lr=0.3), 5, steps=100, eval_every=10)
    [row] = fit(inverter, data(**options)).values()
    first, *later = [point.discrete_loss for point in row.trace]
    assert min(later) < 0.8 * first


def test_verify_and_score_reason_as_the_run_did(model_folder, two_stages, tmp_path, capsys):
    flags = ["--config", CONFIGS / "prompt_engineering" / "sums_two_stages.yaml"]
    flags += ["--data.lm", model_folder(), "--data.chat", "false", "--model.steps", "3"]
    flags += ["--data.targets.source", two_stages["targets"].source]
    flags += ["--data.targets.reasoning_tokens", "5", "--data.targets.trigger", "\\nw25"]
    flags += ["--data.targets.answer", " {final}", "--data.template", "{question} {slot}"]
    flags += ["--data.dtype", "float64", "--trainer.accelerator", "cpu"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    [results] = tmp_path.rglob("results.jsonl")
    assert run("verify", results) == 0
    score = ["--results", results.parent, "--examples", two_stages["targets"].source]
    score += ["--out", tmp_path / "scores.json", "--draws", "1"]
    assert run("score", *score) == 0
    [row] = read_rows(results)
    answered = json.loads((tmp_path / "scores.json").read_text())["scores"][-1]["answered"]
    assert len(row.examples) == len(answered) == len(QUESTIONS)
    for example, answer in zip(row.examples, answered, strict=True):
        assert answer["output_text"].startswith(f"{example.reasoning_text}\nw25")
    line = json.loads(results.read_text())
    lie = {**line["examples"][0], "reasoning_ids": [5]}
    results.write_text(json.dumps({**line, "examples": [lie, *line["examples"][1:]]}))
    assert run("verify", results) == 1
    capsys.readouterr()


def test_settings_that_do_not_go_together_are_refused(data, two_stages, tmp_path):
    with pytest.raises(InputError, match="reasoning_tokens"):
        changed(two_stages, reasoning_tokens=0)
    share = Sharing(held_out=str(tmp_path / "x.jsonl"))
    with pytest.raises(InputError, match="held_out"):
        data(**{**two_stages, "share": share}).load()
    with pytest.raises(InputError, match=">= 1 at `max_tokens`"):
        build(Reasoning, {"max_tokens": 0, "trigger": "", "trigger_ids": []})
    with pytest.raises(InputError, match=r"end of `data\.targets\.trigger`"):
        data(**changed(two_stages, answer="{final}")).load()  # "w26" and "w4" would be one word
    answers = data(**changed(two_stages, answer=" w2 {final} w3"))
    answers.load()
    assert answers.targets[0].examples[0].text == " w2 w4 w3"


@pytest.mark.real
def test_the_packaged_model_reasons_about_packaged_questions():
    """Words before the answer, and the loss that the model itself gives by hand."""
    questions = Questions(limit=2, reasoning_tokens=12, trigger="\\n#### ", answer="{final}")
    data = TargetDataModule(
        targets=questions, template="{question}{slot}", chat=True, share=Sharing()
    )
    data.load()
    lm, [target] = data.lm, data.targets
    prompt_ids = tuple(lm.encode(" Answer in one short sentence."))
    vocabulary = Vocabulary(lm)
    slot = open_slot(vocabulary, target, len(prompt_ids))
    reason(lm, slot, prompt_ids)
    assert all(len(lm.decode(said).split()) > 3 for said in slot.reasoning.values())
    [scores] = Engine(vocabulary)([Pass(torch.tensor([prompt_ids]), slot.examples)])
    expected = sum(loss_by_hand(lm, example, prompt_ids) for example in target.measured) / 2
    assert float(scores.losses) == pytest.approx(expected, rel=1e-3)
