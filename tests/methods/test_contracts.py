"""What is true of every method. Each runs once per row of `METHODS`."""

import inspect
import re

import pytest
import torch
from helpers.methods import METHODS, RUN_OPTIONS, SMALL, make_inverter
from helpers.resuming import stop_and_resume
from helpers.runs import LossCurve, StopAfter, assert_same, comparable
from helpers.weights import weights_hash
from lightning.pytorch import Callback

import dlmi.methods
from dlmi import InputError
from dlmi.methods import Refined
from dlmi.methods.base import Method, Search, settings_of
from dlmi.rows import read_rows
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.run.callbacks.results import ResultWriter

_plain_runs = {}


@pytest.fixture(params=list(METHODS))
def name(request):
    return request.param


@pytest.fixture
def plain_run(name, data, fit):
    """The rows of a run with two slots, made once for each row of the table."""
    if name not in _plain_runs:
        _plain_runs[name] = fit(make_inverter(name), data())
    return _plain_runs[name]


def first_method(name):
    method = METHODS[name]
    return method.first if isinstance(method, Refined) else method


def cost(row):
    return row.forward_tokens + row.backward_tokens


def test_every_method_of_the_package_is_here():
    classes = {getattr(dlmi.methods, name) for name in dlmi.methods.__all__}
    methods = {kind for kind in classes if inspect.isclass(kind) and issubclass(kind, Method)}
    assert methods == {type(method) for method in METHODS.values()}


def test_loss_falls(name, data, fit):
    """By a margin that rounding, which differs from CPU to CPU, does not reach."""
    curve = LossCurve()
    targets = data(batch_size=8, k=(3,), per_k=8)
    fit(make_inverter(name, steps=80, eval_every=80), targets, callbacks=[curve])
    totals = [sum(losses) for losses in curve.losses]
    assert sum(totals[-10:]) < 0.95 * sum(totals[:10])


def test_it_owns_its_slots_and_leaves_the_lm_alone(name, data, fit):
    targets, model = data(), make_inverter(name)
    targets.load()
    before = weights_hash(targets.lm)
    fit(model, targets)
    assert weights_hash(targets.lm) == before
    assert all(p.grad is None and not p.requires_grad for p in targets.lm.model.parameters())
    names = [found for found, _ in model.named_parameters()]
    method = first_method(name)
    if isinstance(method, Search):
        assert names == []
        assert model.configure_optimizers() is None
        return
    own = {"Z", "Phi"} if getattr(method, "temperature", "fixed") != "fixed" else {"Z"}
    assert set(names) == {f"prompts.{slot}.{tensor}" for slot in range(2) for tensor in own}
    for slot in range(2):
        shapes = {key: tuple(p.shape) for key, p in model.prompts[slot].items()}
        assert shapes == method.shapes(5, model.vocabulary)


def test_rows_verify(name, plain_run, tiny):
    """What a row records is what a fresh decode of its prompt gives, alone and in full."""
    assert len(plain_run) == 4
    for row in plain_run.values():
        prompt_ids = torch.tensor([row.prompt_ids])
        assert tuple(tiny.greedy(prompt_ids, 4)[0].tolist()) == row.output_ids
        assert row.exact == (row.output_ids == row.target_ids)
        assert row.stop_reason == ("solved" if row.exact else "budget")
        assert row.steps == 12 or row.exact
        assert row.lcs == max(point.lcs for point in row.trace)  # the best of all evaluations
        steps = [point.step for point in row.trace]
        assert steps == sorted(steps)
        assert set(steps) >= set(range(0, row.steps + 1, 4))
        costs = [point.token_passes for point in row.trace]
        assert costs == sorted(costs)
        assert costs[-1] == cost(row)


def test_settings_of_a_row_are_those_of_the_method_and_the_run(name, plain_run):
    method = METHODS[name]
    for row in plain_run.values():
        assert row.method == type(method).__name__
        for setting, value in {**settings_of(method), **SMALL, **RUN_OPTIONS.get(name, {})}.items():
            assert row.settings[setting] == value, setting
        assert row.settings["seed"] == row.seed == 0
    if isinstance(method, Refined):
        first = row.settings["first"]
        assert first == {"method": type(method.first).__name__, **settings_of(method.first)}


def test_draws_follow_the_seed(name, plain_run, data, fit):
    def paths(rows):
        return {i: [point.discrete_loss for point in row.trace] for i, row in rows.items()}

    assert comparable(fit(make_inverter(name), data())) == comparable(plain_run)
    if not name.startswith("soda"):  # which draws nothing before its first restart
        assert paths(fit(make_inverter(name, seed=2), data())) != paths(plain_run)


def test_batch_mates_do_not_matter(name, plain_run, data, fit):
    for slots in (1, 3):
        assert_same(fit(make_inverter(name), data(batch_size=slots)), plain_run)


def test_targets_of_different_lengths_share_a_batch(name, data, fit):
    texts = ["w1 w2", "w3 w4 w5 w6 w7", "w8"]
    together = fit(make_inverter(name), data(texts=texts, batch_size=3))
    alone = fit(make_inverter(name), data(texts=texts, batch_size=1))
    assert [len(together[f"text_{i}"].output_ids) for i in range(3)] == [2, 5, 1]
    assert_same(together, alone)


@pytest.mark.parametrize(("stop_after", "slots"), [(3, None), (4, 3), (13, 1)])
def test_resume_gives_the_rows_of_a_run_that_never_stopped(
    name, plain_run, data, fit, tmp_path, stop_after, slots
):
    """Into as many slots bit for bit; into another number to rounding."""

    def make():
        return make_inverter(name)

    rows = stop_and_resume(make, data, fit, tmp_path / "run", stop_after, slots)
    if slots is None:
        assert comparable(rows) == comparable(plain_run)
    else:
        assert_same(rows, plain_run)


def test_a_checkpoint_holds_the_slots_and_no_lm(name, data, fit, tmp_path):
    model, targets = make_inverter(name), data()
    fit(
        model,
        targets,
        callbacks=[StopAfter(5), RunCheckpoint()],
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"] == {}
    assert checkpoint["optimizer_states"] == []
    slots = checkpoint["inversion"]["slots"]
    assert [slot["step"] for slot in slots] == [slot.step for slot in model.active]
    assert slots

    weights = {tuple(weight.shape) for weight in targets.lm.model.state_dict().values()}
    found = [t for t in tensors(checkpoint) if t.is_floating_point()]
    # Embeddings, attention and the like are matrices; what a slot keeps is (N, V) or smaller.
    assert not {tuple(tensor.shape) for tensor in found if tensor.dim() > 1} & weights
    assert sum(t.numel() for t in found) < sum(p.numel() for p in targets.lm.model.parameters()) / 2


def tensors(value):
    """All tensors in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return [tensor for part in inner for tensor in tensors(part)]
    return []


def test_a_token_budget_is_never_overrun(name, data, fit):
    """Nor is much of it left; and one that does not cover start and decodes is refused."""
    with pytest.raises(InputError, match="`model.token_budget` to be at least") as refused:
        fit(make_inverter(name, token_budget=1), data())
    least = int(re.search(r"at least (\d+)", str(refused.value)).group(1))
    with pytest.raises(InputError, match=f"at least {least}"):
        fit(make_inverter(name, token_budget=least - 1), data())
    used = []
    for budget in (least, least + 137, 3 * least + 400):
        rows = fit(make_inverter(name, steps=10_000, token_budget=budget), data())
        assert all(cost(row) <= budget for row in rows.values())
        assert all(row.exact for row in rows.values() if row.stop_reason != "budget")
        used.append(sum(row.steps for row in rows.values()))
    assert used[0] < used[-1]
    assert used == sorted(used)


@pytest.mark.parametrize("name", ["dlmi", "gcg", "adc_refined"], indirect=True)
def test_a_killed_run_keeps_rows_written_after_its_checkpoint(name, data, fit, tmp_path):
    """A kill: the checkpoint is old, newer rows are on disk, and the last line is half written."""
    expected = fit(make_inverter(name), data(batch_size=1))
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run"}

    class Kill(Exception):
        pass

    class KillAfter(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == kill_at:
                raise Kill

    # Checkpoints at 5, 10, ... 25; rows after 12 and 24 steps, or earlier if solved.
    kill_at = min(30, sum(row.steps for row in expected.values()) - 2)
    callbacks = [ResultWriter(), RunCheckpoint(every_n_steps=5), KillAfter()]
    with pytest.raises(Kill):
        fit(make_inverter(name), data(batch_size=1), callbacks=callbacks, **options)
    results = tmp_path / "run" / "results.jsonl"
    assert len(read_rows(results)) >= 2
    with results.open("a") as file:
        file.write('{"target_id": "k3_sa')
    fit(
        make_inverter(name),
        data(batch_size=1),
        ckpt_path=tmp_path / "run" / "checkpoints" / "last.ckpt",
        callbacks=[ResultWriter(), RunCheckpoint()],
        **options,
    )
    rows = read_rows(results)
    assert len(rows) == len(expected)
    assert comparable({row.target_id: row for row in rows}) == comparable(expected)
