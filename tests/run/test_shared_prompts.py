"""One prompt for many examples: mini-batches, their mean, evaluation, and every method."""

import json

import pytest
import torch
from helpers.by_hand import by_hand
from helpers.command_line import CONFIGS, run
from helpers.methods import make_inverter
from helpers.resuming import stop_and_resume
from helpers.runs import assert_same, comparable

from dlmi import InputError, Inverter, Target
from dlmi.gradients.callback import GradientStudy
from dlmi.methods import DLMI, SwapSearch
from dlmi.metrics import lcs_ratio
from dlmi.rows import Inversion, read_rows
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import evaluate
from dlmi.scoring.losses import token_losses
from dlmi.scoring.passes import Pass
from dlmi.scoring.verification import try_row
from dlmi.targets.context import Context
from dlmi.targets.sources import File, Questions, Sharing
from dlmi.targets.target import fingerprint_targets, share_prefix, share_prompt
from dlmi.tokens.vocabulary import Vocabulary

LINES = [
    {"id": "a", "question": "w1 w2 w3", "text": " w4 w5"},
    {"id": "b", "question": "w6", "text": " w7 w8 w9"},
    {"id": "c", "question": "w10 w11", "text": " w12"},
    {"id": "d", "question": "w1 w11", "text": " w13 w4"},
    {"id": "e", "question": "w2", "text": " w1"},
]
HELD_OUT = [{"id": "h", "question": "w9 w9", "text": " w12 w1"}]
TEMPLATE = "w20 {question} {slot} w22"
OF_EACH_KIND = ("dlmi", "gcg", "swap_search_window", "soda_refined")


def single(number, beginning, ids):
    return Target.single(f"t{number}", ids, "", Context(((3, *beginning), (7,))))


SINGLES = [
    single(0, (4, 5), (13, 14)),
    single(1, (), (16,)),
    single(2, (9,), (18, 19, 20)),
    single(3, (8, 8), (21, 22)),
    single(4, (6,), (23,)),
]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def shared(tmp_path):
    held_out = write(tmp_path / "held_out.jsonl", HELD_OUT)
    return {
        "targets": File(write(tmp_path / "learn.jsonl", LINES)),
        "template": TEMPLATE,
        "share": Sharing(per_step=2, evaluated=3, held_out=held_out),
    }


# ---- mini-batches


def test_every_example_has_its_turn_before_any_has_its_next():
    target = share_prompt(SINGLES, per_step=2)
    turns = [example.id for step in range(10) for example in target.minibatch(step, 0)]
    rounds = [turns[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(turn) == [f"t{i}" for i in range(5)] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1
    assert turns != [e.id for step in range(10) for e in target.minibatch(step, 1)]
    assert target.minibatch(3, 0) == target.minibatch(3, 0) != target.minibatch(2, 0)
    assert len(share_prompt(SINGLES, per_step=9).minibatch(0, 0)) == 5  # all, if there are fewer
    assert SINGLES[0].minibatch(3, 0) == SINGLES[0].examples


@pytest.mark.parametrize("teacher_forcing", [True, False])
def test_the_loss_is_the_mean_over_examples_and_so_is_its_gradient(tiny, teacher_forcing):
    """A target of examples beside one of a single example; the model itself is the truth."""
    [target, other] = share_prefix([share_prompt(SINGLES, per_step=3), SINGLES[3]])
    read = [target.minibatch(0, 0), other.examples]
    ids = torch.randint(3, 30, (2, 2, 5), generator=torch.Generator().manual_seed(1))
    embeds = tiny.embed(ids).clone().requires_grad_()
    engine = Engine(Vocabulary(tiny))
    found = engine(
        [
            Pass(embeds[b], examples, teacher_forcing=teacher_forcing)
            for b, examples in enumerate(read)
        ]
    )
    losses = torch.stack([scores.losses for scores in found])
    weights = torch.rand(2, 2, dtype=torch.float64)
    [gradient] = torch.autograd.grad((losses * weights).sum(), embeds)
    expected = torch.zeros_like(losses)
    for b, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
        said = []
        for example in read[b]:
            _, whole = by_hand(tiny, example.context, embeds[b, s], example.ids)
            wanted = torch.tensor([example.ids])
            if teacher_forcing:
                logits = tiny.target_logits(whole[None], wanted)
            else:
                logits = tiny.free_run(whole[None], len(example.ids))
            loss = token_losses("cross_entropy", logits, wanted).mean()
            expected[b, s] = expected[b, s] + loss / len(read[b])
            said += logits[0].argmax(-1).tolist()
        assert found[b].output_ids[s].tolist() == said
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    [by_whole] = torch.autograd.grad((expected * weights).sum(), embeds)
    torch.testing.assert_close(gradient, by_whole, rtol=1e-4, atol=1e-5)


def test_evaluations_and_candidates_are_means_over_examples(tiny):
    [target] = share_prefix([share_prompt(SINGLES, per_step=2, evaluated=4)])
    prompt_ids = torch.randint(3, 30, (3, 5), generator=torch.Generator().manual_seed(2))
    evaluations = evaluate(tiny, prompt_ids, [target] * 3, [0] * 3)
    engine = Engine(Vocabulary(tiny))
    [scores] = engine([Pass(prompt_ids, target.measured, like_ids=prompt_ids[0])])
    for row, evaluation in enumerate(evaluations):
        each = evaluate(tiny, prompt_ids[row].repeat(4, 1), SINGLES[:4], [0] * 4)
        assert evaluation.output_ids == tuple(i for e in each for i in e.output_ids)
        assert evaluation.lcs == pytest.approx(sum(e.lcs for e in each) / 4)
        mean = sum(e.discrete_loss for e in each) / 4
        assert evaluation.discrete_loss == pytest.approx(mean, rel=1e-5)
        assert float(scores.losses[row]) == pytest.approx(mean, rel=1e-5)
    assert scores.output_ids.shape == (3, len(target.ids))


def test_what_examples_are_to_say_is_barred_in_all_of_them(tiny):
    target = share_prompt(SINGLES, per_step=1, evaluated=1)
    vocabulary = Vocabulary(tiny, forbid_target_tokens="ids")
    barred = vocabulary.ids(vocabulary.barred_columns(target)).tolist()
    assert barred == sorted({i for t in SINGLES for i in t.ids})


def test_the_pool_and_the_mini_batch_are_part_of_the_run():
    prints = {
        fingerprint_targets([share_prompt(*options)])
        for options in [
            (SINGLES, 2),
            (SINGLES, 3),
            (SINGLES[:4], 2),
            (SINGLES, 2, 3),
            (SINGLES[:4], 2, None, SINGLES[4:]),
        ]
    }
    assert len(prints) == 5


# ---- every method


def test_every_method_learns_one_prompt_for_all(make_shared_method, data, fit, shared):
    targets = data(**shared)
    rows = fit(make_shared_method(), targets)
    lm = targets.lm
    assert list(rows) == ["shared"]
    row = rows["shared"]
    assert [example.id for example in row.examples] == ["a", "b", "c"]
    assert [example.id for example in row.held_out] == ["h"]
    for line, example in zip([*LINES[:3], *HELD_OUT], [*row.examples, *row.held_out], strict=True):
        assert example.full_text == f"w20 {line['question']} {row.prompt_text} w22"
        ids = torch.tensor([lm.encode(example.full_text)])
        assert tuple(lm.greedy(ids, len(example.ids))[0].tolist()) == example.output_ids
        assert example.lcs == lcs_ratio(lm.encode(line["text"]), example.output_ids)
    assert row.lcs == pytest.approx(sum(e.lcs for e in row.examples) / 3)
    assert row.lcs == row.lcs_matrix["best_so_far"]["free_greedy"] == row.round_trip_lcs
    assert row.exact == all(e.exact for e in row.examples)
    assert row.output_ids == tuple(i for e in row.examples for i in e.output_ids)
    assert Inversion.from_json(json.loads(row.to_json_line())) == row


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_neither_a_stop_nor_fewer_rows_per_pass_change_a_result(name, data, fit, shared, tmp_path):
    expected = fit(make_inverter(name), data(**shared))
    folder = tmp_path / "run"
    resumed = stop_and_resume(lambda: make_inverter(name), lambda: data(**shared), fit, folder)
    assert comparable(resumed) == comparable(expected)
    assert_same(fit(make_inverter(name), data(**shared, rows_per_pass=1)), expected)


@pytest.mark.parametrize(
    ("method", "steps", "per_step"),
    [(DLMI(tau0=1.0, num_samples=4, lr=0.3), 100, 2), (SwapSearch(width=8), 40, 5)],
    ids=["dlmi", "swap_search"],
)
def test_the_loss_over_all_examples_falls(method, steps, per_step, data, fit, shared):
    """What a relaxation learns from two examples at a time helps on all of them."""
    options = {**shared, "share": Sharing(per_step=per_step, evaluated=None)}
    [row] = fit(Inverter(method, 5, steps=steps, eval_every=10), data(**options)).values()
    first, *later = [point.discrete_loss for point in row.trace]
    assert min(later) < 0.8 * first


# ---- runs


def test_verify_and_transfer_of_a_shared_prompt(model_folder, shared, tmp_path, tiny, capsys):
    flags = ["--data.targets", "File", "--data.targets.path", shared["targets"].path]
    flags += ["--data.template", TEMPLATE, "--data.share.held_out", shared["share"].held_out]
    flags += ["--data.share.per_step", "2", "--data.share.evaluated", "3"]
    flags += ["--data.lm", model_folder(), "--trainer.accelerator", "cpu", "--model.method", "DLMI"]
    flags += ["--data.dtype", "float64", "--model.prompt_length", "4", "--model.steps", "3"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    [results] = tmp_path.rglob("results.jsonl")
    assert run("verify", results) == 0
    [row] = read_rows(results)
    tried = try_row(tiny, row)
    assert (tried.exact, tried.lcs, tried.text_lcs) == (row.exact, row.lcs, row.round_trip_lcs)
    assert try_row(tiny, row, as_text=True).text_lcs == row.round_trip_lcs
    line = json.loads(results.read_text())
    for kind in ("examples", "held_out"):
        lie = {**line, kind: [{**line[kind][0], "output_ids": [5, 5, 5]}, *line[kind][1:]]}
        results.write_text(json.dumps(lie) + "\n")
        assert run("verify", results) == 1
    capsys.readouterr()


def test_the_gradient_study_is_of_one_example(data, fit, shared):
    with pytest.raises(InputError, match="GradientStudy"):
        fit(make_inverter("dlmi"), data(**shared), callbacks=[GradientStudy(["gs_tau1"])])


@pytest.mark.parametrize("name", ["sums.yaml", "gsm8k.yaml", "sums_two_stages.yaml"])
def test_shipped_configs_learn_from_questions_and_are_scored(name, model_folder, tmp_path, capsys):
    """From the config to the accuracy, on the tiny LM and a file in the format of GSM8k."""
    lines = [
        {"question": f"w{i} w{i + 1}", "answer": f"w{i} w{i + 2}\n#### {i}"} for i in range(1, 6)
    ]
    questions = write(tmp_path / "questions.jsonl", lines)
    flags = ["--config", CONFIGS / "prompt_engineering" / name, "--data.lm", model_folder()]
    flags += ["--data.chat", "false", "--data.targets.source", questions, "--model.steps", "2"]
    flags += ["--data.targets.limit", "4", "--trainer.accelerator", "cpu"]
    flags += ["--data.template", "{question} {slot}"]
    reasons = name == "sums_two_stages.yaml"
    if reasons:  # the tiny LM has no mark
        flags += ["--data.targets.reasoning_tokens", "3", "--data.targets.trigger", " w20"]
        flags += ["--data.targets.answer", " w{final}"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    [results] = tmp_path.rglob("results.jsonl")
    [row] = read_rows(results)
    wanted = [f" w{i}" if reasons else lines[i - 1]["answer"] for i in range(1, 5)]
    assert [example.text for example in row.examples] == wanted
    score = ["--results", results, "--draws", "1", "--examples", questions]
    assert run("score", *score, "--max_new_tokens", "4", "--out", tmp_path / "scores.json") == 0
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["scores"][-1]["prompt_ids"] == list(row.prompt_ids)
    asked = written["settings"]
    assert (asked["lm"], asked["chat"]) == (str(model_folder()), False)
    assert (asked["template"], asked["two_stages"]) == ("{question} {slot}", reasons)
    if reasons:
        assert (asked["trigger"], asked["max_reasoning_tokens"]) == (" w20", 3)
    other = {**json.loads(results.read_text()), "target_id": "other", "dtype": "float16"}
    results.write_text(results.read_text() + json.dumps(other) + "\n")
    assert run("score", *score) == 2
    assert "Expected `--dtype` to be given with rows that differ" in capsys.readouterr().err


def test_questions_become_examples(data, tmp_path):
    lines = [{"question": "w1 w2", "answer": "w3\n#### 7.0"}, {"question": "w4", "answer": "w5"}]
    questions = Questions(write(tmp_path / "q.jsonl", lines), answer=" w8 {final}")
    targets = data(targets=questions, template="{question} {slot} w9", share=Sharing())
    targets.load()
    [target] = targets.targets
    assert [example.text for example in target.examples] == [" w8 7", " w8 w5"]
    assert target.examples[0].context.pieces == ((4, 5), (12,))
