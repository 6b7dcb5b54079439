"""One prompt for many examples: mini-batches, their mean, evaluation, and every method."""

import json

import pytest
import torch
from conftest import SMALL
from test_cli import CONFIGS, run
from test_contracts import StopAfter, assert_same, comparable
from test_templates import by_hand

from dlmi import InputError, Target
from dlmi.callbacks import GradientStudy, ResultWriter, RunCheckpoint
from dlmi.candidates import score_candidates
from dlmi.evaluation import evaluate_prompts
from dlmi.framed_targets import fingerprint_targets, share_head, share_prompt
from dlmi.frames import Frame
from dlmi.losses import target_loss
from dlmi.methods import DLMI, EchoSearch
from dlmi.metrics import lcs_ratio
from dlmi.passes import target_pass
from dlmi.results import Inversion, read_rows
from dlmi.slots import Slot
from dlmi.transfer import try_row
from dlmi.vocabulary import Vocabulary

CPU = torch.device("cpu")
LINES = [
    {"id": "a", "question": "w1 w2 w3", "text": " w4 w5"},
    {"id": "b", "question": "w6", "text": " w7 w8 w9"},
    {"id": "c", "question": "w10 w11", "text": " w12"},
    {"id": "d", "question": "w1 w11", "text": " w13 w4"},
    {"id": "e", "question": "w2", "text": " w1"},
]
HELD_OUT = [{"id": "h", "question": "w9 w9", "text": " w12 w1"}]
TEMPLATE = "w20 {question} {slot} w22"


def single(number, beginning, ids):
    return Target(f"t{number}", ids, "", frame=Frame(((3, *beginning), (7,))))


SINGLES = [
    single(0, (4, 5), (13, 14)),
    single(1, (), (16,)),
    single(2, (9,), (18, 19, 20)),
    single(3, (8, 8), (21, 22)),
    single(4, (6,), (23,)),
]


@pytest.fixture
def shared(tmp_path):
    def write(name, lines):
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return {
        "targets_file": write("learn.jsonl", LINES),
        "held_out_file": write("held_out.jsonl", HELD_OUT),
        "template": TEMPLATE,
        "shared": True,
        "examples_per_step": 2,
        "eval_examples": 3,
    }


# ---- mini-batches


def test_every_example_has_its_turn_before_any_has_its_next():
    slot = Slot.open(0, share_prompt(SINGLES, per_step=2), 0, CPU)
    turns = [example.id for step in range(10) for example in slot.target_at(step).readings]
    rounds = [turns[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(turn) == [f"t{i}" for i in range(5)] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1
    other = Slot.open(0, share_prompt(SINGLES, per_step=2), 1, CPU)
    assert turns != [e.id for step in range(10) for e in other.target_at(step).readings]


def test_a_step_reads_the_examples_of_its_own_step():
    slot = Slot.open(0, share_prompt(SINGLES, per_step=9), 0, CPU)
    assert len(slot.target_at().readings) == 5  # all, if there are fewer
    slot = Slot.open(0, share_prompt(SINGLES, per_step=2), 0, CPU)
    slot.step = 3
    assert slot.target_at() == slot.target_at(3) != slot.target_at(2)
    alone = Slot.open(0, SINGLES[0], 0, CPU)
    assert alone.target_at() is alone.target


@pytest.mark.parametrize("teacher_forcing", [True, False])
def test_the_loss_is_the_mean_over_examples_and_so_is_its_gradient(tiny, teacher_forcing):
    """One slot with examples beside one of a target alone; the model itself is the truth."""
    [target, other] = share_head([share_prompt(SINGLES, per_step=3), SINGLES[3]])
    slots = [Slot.open(0, target, 0, CPU), Slot.open(1, other, 0, CPU)]
    embeds = tiny.embed(torch.randint(3, 30, (2, 2, 5))).clone().requires_grad_()
    losses, output_ids = target_pass(tiny, slots, embeds, "cross_entropy", teacher_forcing)
    weights = torch.rand(2, 2, dtype=torch.float64)
    [gradient] = torch.autograd.grad((losses * weights).sum(), embeds)
    expected = torch.zeros_like(losses)
    for b, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
        readings = slots[b].target_at().readings
        said = []
        for example in readings:
            _, whole = by_hand(tiny, example.frame, embeds[b, s], example.ids, False)
            wanted = torch.tensor([example.ids])
            if teacher_forcing:
                logits = tiny.target_logits(whole[None], wanted)
            else:
                logits = tiny.free_run(whole[None], len(example.ids))
            mask = torch.ones_like(wanted, dtype=torch.bool)
            loss = target_loss("cross_entropy", logits, wanted, mask)[0]
            expected[b, s] = expected[b, s] + loss / len(readings)
            said += logits[0].argmax(-1).tolist()
        assert output_ids[b, s, : len(said)].tolist() == said
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    [by_whole] = torch.autograd.grad((expected * weights).sum(), embeds)
    torch.testing.assert_close(gradient, by_whole, rtol=1e-4, atol=1e-5)


def test_evaluations_and_candidates_are_means_over_examples(tiny):
    [target] = share_head([share_prompt(SINGLES, per_step=2, evaluated=4)])
    prompt_ids = torch.randint(3, 30, (3, 5), generator=torch.Generator().manual_seed(2))
    evaluations = evaluate_prompts(tiny, prompt_ids, [target] * 3, [0] * 3)
    losses, output_ids, _ = score_candidates(tiny, prompt_ids[0], prompt_ids, target)
    for row, evaluation in enumerate(evaluations):
        each = evaluate_prompts(tiny, prompt_ids[row].repeat(4, 1), SINGLES[:4], [0] * 4)
        assert evaluation.output_ids == tuple(i for e in each for i in e.output_ids)
        assert evaluation.lcs == pytest.approx(sum(e.lcs for e in each) / 4)
        mean = sum(e.discrete_loss for e in each) / 4
        assert evaluation.discrete_loss == pytest.approx(mean, rel=1e-5)
        assert float(losses[row]) == pytest.approx(mean, rel=1e-5)
        assert output_ids.shape == (3, len(target.ids))


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


def assert_resumes(make_method, make_data, fit, folder):
    """A run that is stopped after five steps ends as one that is not."""
    expected = fit(make_method(), make_data())
    options = {"enable_checkpointing": True, "default_root_dir": folder}
    stop = [ResultWriter(), RunCheckpoint(), StopAfter(5)]
    fit(make_method(), make_data(), callbacks=stop, **options)
    fit(
        make_method(),
        make_data(),
        ckpt_path=folder / "checkpoints" / "last.ckpt",
        callbacks=[ResultWriter(), RunCheckpoint()],
        **options,
    )
    rows = {row.target_id: row for row in read_rows(folder)}
    assert comparable(rows) == comparable(expected)


def test_resume_of_a_shared_prompt(make_shared_method, data, fit, shared, tmp_path):
    assert_resumes(make_shared_method, lambda: data(**shared), fit, tmp_path / "run")


def test_rows_per_pass_changes_no_result(make_shared_method, data, fit, shared):
    assert_same(
        fit(make_shared_method(), data(**shared, rows_per_pass=1)),
        fit(make_shared_method(), data(**shared)),
    )


def test_the_loss_over_all_examples_falls(data, fit, shared):
    """What a step learns from two examples helps on all of them."""
    options = {**shared, "eval_examples": None}
    [row] = fit(
        DLMI(5, steps=150, eval_every=10, tau0=1.0, num_samples=4, lr=0.3), data(**options)
    ).values()
    first, *later = [point.discrete_loss for point in row.trace]
    assert min(later) < 0.8 * first


# ---- runs


def test_verify_and_transfer_of_a_shared_prompt(model_folder, shared, tmp_path, tiny, capsys):
    flags = [part for name in shared for part in (f"--data.{name}", shared[name])]
    flags += ["--data.lm", model_folder(), "--trainer.accelerator", "cpu", "--model", "DLMI"]
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


def test_settings_that_do_not_go_together_are_refused(data, fit, shared, tmp_path):
    with pytest.raises(InputError, match="data.targets_file"):
        data(shared=True)
    with pytest.raises(InputError, match="data.shared: true"):
        data(**{**shared, "shared": False})
    for name in ("examples_per_step", "eval_examples"):
        with pytest.raises(InputError, match=name):
            data(**{**shared, name: 0})
    with pytest.raises(InputError, match="refine_after"):
        fit(DLMI(**SMALL, refine_after=0.5), data(**shared))
    with pytest.raises(InputError, match="EchoSearch"):
        fit(EchoSearch(**SMALL), data(**shared))
    with pytest.raises(InputError, match="GradientStudy"):
        fit(DLMI(**SMALL), data(**shared), callbacks=[GradientStudy(["gs_tau1"])])


@pytest.mark.parametrize("name", ["sums.yaml", "gsm8k.yaml"])
def test_shipped_configs_learn_from_questions_and_are_scored(name, model_folder, tmp_path, capsys):
    """From the config to the accuracy, on the tiny LM and a file in the format of GSM8k."""
    questions = tmp_path / "questions.jsonl"
    lines = [
        {"question": f"w{i} w{i + 1}", "answer": f"w{i} w{i + 2}\n#### {i}"} for i in range(1, 6)
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--config", CONFIGS / "prompt_engineering" / name, "--data.lm", model_folder()]
    flags += ["--data.chat", "false", "--data.questions", questions, "--model.steps", "2"]
    flags += ["--data.max_questions", "4", "--trainer.accelerator", "cpu"]
    flags += ["--data.template", "{question} {slot}"]
    assert run("fit", *flags, "--trainer.logger.init_args.save_dir", tmp_path) == 0
    [results] = tmp_path.rglob("results.jsonl")
    [row] = read_rows(results)
    assert [example.text for example in row.examples] == [line["answer"] for line in lines[:4]]
    score = ["--results", results, "--lm", model_folder(), "--chat", "false", "--draws", "1"]
    score += ["--examples", questions, "--template", "{question} {slot}", "--max_new_tokens", "4"]
    assert run("score", *score, "--out", tmp_path / "scores.json") == 0
    scored = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert scored[-1]["prompt_ids"] == list(row.prompt_ids)
    capsys.readouterr()


def test_questions_become_targets(data, fit, tmp_path):
    lines = [{"question": "w1 w2", "answer": "w3\n#### 7.0"}, {"question": "w4", "answer": "w5"}]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"questions": str(path), "template": "{question} {slot} w9", "shared": True}
    targets = data(**options, answer=" w8 {final}")
    targets.load()
    [target] = targets.targets
    assert [example.text for example in target.examples] == [" w8 7", " w8 w5"]
    assert target.examples[0].frame.pieces == ((4, 5), (12,))
    for change in ({"shared": False}, {"template": None}, {"texts": ["w1"]}, {"answer": "{slot}"}):
        with pytest.raises(InputError):
            data(**{**options, **change})
    with pytest.raises(InputError, match="nothing"):
        data(**options, answer="{nothing}").load()
