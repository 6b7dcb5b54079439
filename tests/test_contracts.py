"""What is true of every method. Each runs once per row of `METHODS` in conftest."""

import dataclasses
import inspect
import itertools

import pytest
import torch
from conftest import METHODS
from lightning.pytorch import Callback
from test_lm import weights_hash

import dlmi.methods
from dlmi.callbacks import ResultWriter, RunCheckpoint
from dlmi.results import read_rows
from dlmi.slots import Slot

VOLATILE = {"seconds": 0.0, "trace": (), "versions": {}}


def comparable(rows):
    """Rows without wall times; the trace keeps its steps and scores."""
    return {
        target_id: (
            dataclasses.replace(row, **VOLATILE),
            [dataclasses.replace(point, seconds=0.0) for point in row.trace],
        )
        for target_id, row in rows.items()
    }


def assert_same(rows, expected):
    """Same prompts, outputs and decisions; losses to rounding (batches add in other orders)."""
    assert rows.keys() == expected.keys()
    for target_id, row in rows.items():
        other = expected[target_id]
        for name in (
            *("prompt_ids", "output_ids", "lcs", "best_step", "steps", "stop_reason"),
            *("forward_tokens", "backward_tokens"),
        ):
            assert getattr(row, name) == getattr(other, name), (target_id, name)
        assert row.discrete_loss == pytest.approx(other.discrete_loss, rel=1e-5)
        if row.best_step:
            assert row.loss == pytest.approx(other.loss, rel=1e-5)


class LossCurve(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append([float(slot.loss) for slot in pl_module.active])


class StopAfter(Callback):
    """A Ctrl-C after a given number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.stop_requested = trainer.global_step >= self.steps


def test_every_method_of_the_package_is_here():
    classes = {
        name for name in dlmi.methods.__all__ if inspect.isclass(getattr(dlmi.methods, name))
    }
    assert classes == {method.__name__ for method, _ in METHODS.values()}


def test_loss_falls(make_method, data, fit):
    """By a margin that rounding, which differs from CPU to CPU, does not reach."""
    curve = LossCurve()
    targets = data(batch_size=8, k=(3,), per_k=8)
    fit(make_method(steps=80, eval_every=80), targets, callbacks=[curve])
    totals = [sum(losses) for losses in curve.losses]
    assert sum(totals[-10:]) < 0.95 * sum(totals[:10])


def test_lm_is_bit_identical_afterwards(make_method, data, fit):
    targets = data()
    targets.load()
    before = weights_hash(targets.lm)
    fit(make_method(), targets)
    assert weights_hash(targets.lm) == before
    assert all(p.grad is None and not p.requires_grad for p in targets.lm.model.parameters())


def test_only_z_and_phi_are_parameters(make_method, data, fit):
    model = make_method()
    fit(model, data())
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert "Z" in names
    assert names <= {"Z", "Phi"}
    assert len(model.Z) == 2  # one per slot


def test_same_seed_same_rows_and_other_seed_other_rows(make_method, data, fit):
    first = fit(make_method(seed=1), data())
    assert comparable(first) == comparable(fit(make_method(seed=1), data()))
    assert comparable(first) != comparable(fit(make_method(seed=2), data()))


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_batch_mates_and_slot_count_do_not_matter(make_method, data, fit, slots):
    options = {"k": (2,), "per_k": 4}
    expected = fit(make_method(), data(batch_size=2, **options))
    assert_same(fit(make_method(), data(batch_size=slots, **options)), expected)


def test_targets_of_different_lengths_share_a_batch(make_method, data, fit):
    texts = ["w1 w2", "w3 w4 w5 w6 w7", "w8"]
    together = fit(make_method(), data(texts=texts, batch_size=3))
    alone = fit(make_method(), data(texts=texts, batch_size=1))
    assert [len(together[f"text_{i}"].output_ids) for i in range(3)] == [2, 5, 1]
    assert_same(together, alone)


@pytest.mark.parametrize("stop_after", [3, 4, 17])
def test_resume_gives_the_rows_of_a_run_that_never_stopped(
    make_method, data, fit, tmp_path, stop_after
):
    expected = fit(make_method(), data())

    def callbacks():
        return [ResultWriter(), RunCheckpoint()]

    def run(**options):
        return fit(
            make_method(),
            data(),
            logger=False,
            enable_checkpointing=True,
            default_root_dir=tmp_path / "run",
            **options,
        )

    run(callbacks=[*callbacks(), StopAfter(stop_after)])
    interrupted = read_rows(tmp_path / "run")
    assert {row.stop_reason for row in interrupted} >= {"interrupted"}
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    run(callbacks=callbacks(), ckpt_path=checkpoint)
    rows = read_rows(tmp_path / "run")
    assert len(rows) == len(expected)  # none lost, none twice
    assert comparable({row.target_id: row for row in rows}) == comparable(expected)


def test_a_killed_run_keeps_rows_written_after_its_checkpoint(make_method, data, fit, tmp_path):
    """A kill: the checkpoint is old, newer rows are on disk, and the last line is half written."""
    expected = fit(make_method(), data(batch_size=1))
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run"}

    class Kill(Exception):
        pass

    class KillAfter(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 30:
                raise Kill

    callbacks = [ResultWriter(), RunCheckpoint(every_n_steps=5), KillAfter()]
    # Checkpoints at 5, 10, ... 25; rows after 12 and 24 steps; the kill at 30.
    with pytest.raises(Kill):
        fit(make_method(), data(batch_size=1), callbacks=callbacks, **options)
    results = tmp_path / "run" / "results.jsonl"
    assert len(read_rows(results)) >= 2
    with results.open("a") as file:
        file.write('{"target_id": "k3_sa')
    fit(
        make_method(),
        data(batch_size=1),
        ckpt_path=tmp_path / "run" / "checkpoints" / "last.ckpt",
        callbacks=[ResultWriter(), RunCheckpoint()],
        **options,
    )
    rows = read_rows(results)
    assert len(rows) == len(expected)
    assert comparable({row.target_id: row for row in rows}) == comparable(expected)


def test_checkpoint_holds_no_lm_and_loads_with_weights_only(make_method, data, fit, tmp_path):
    fit(
        make_method(),
        data(),
        callbacks=[StopAfter(5), RunCheckpoint()],
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert {name.split(".")[0] for name in checkpoint["state_dict"]} <= {"Z", "Phi"}
    slots = checkpoint["inversion"]["slots"]
    assert [slot["step"] for slot in slots] == [5, 5]


def test_rows_verify(make_method, data, fit):
    """What a row records is what a fresh decode of its prompt gives, alone and in full."""
    targets = data()
    for row in fit(make_method(), targets).values():
        prompt_ids = torch.tensor([row.prompt_ids])
        assert tuple(targets.lm.greedy(prompt_ids, 4)[0].tolist()) == row.output_ids
        assert row.exact == (row.output_ids == row.target_ids)
        assert row.steps == 12 or row.stop_reason == "solved"
        best = max(point.lcs for point in row.trace)
        assert row.lcs == best  # best-so-far, never less than any evaluation
        steps = [point.step for point in row.trace]
        assert steps == sorted(steps)
        assert set(steps) >= set(range(0, row.steps + 1, 4))
        costs = [point.token_passes for point in row.trace]
        assert costs == sorted(costs)
        assert costs[-1] == row.forward_tokens + row.backward_tokens


class StepCost(Callback):
    """Token passes of the slots at the end of each step."""

    def __init__(self):
        self.totals = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.totals.append([slot.token_passes for slot in pl_module.active])


def test_a_step_costs_what_the_method_says(make_method, data, fit):
    """At most, where candidates share what they read; to the token elsewhere."""
    method, cost = make_method(steps=3, eval_every=100), StepCost()
    fit(method, data(per_k=1), callbacks=[cost])
    expected = method.token_passes_per_step(4)
    for before, after in itertools.pairwise(cost.totals[:2]):
        for first, second in zip(before, after, strict=True):
            if not method.can_share_prompts:  # a search by swaps, all along or at the end
                assert 0 < second - first <= method.dearest_step(4)
            elif type(method).__name__ == "GCG":
                assert 0.5 * expected < second - first <= expected
            else:
                assert second - first == expected


def test_noise_depends_on_seed_and_target_alone(data):
    targets = data()
    targets.load()
    first, second = targets.targets[:2]
    device = torch.device("cpu")

    def draw(target, seed, index=0):
        return torch.rand(3, generator=Slot.open(index, target, seed, device).generator)

    assert torch.equal(draw(first, 0), draw(first, 0, index=5))
    assert not torch.equal(draw(first, 0), draw(second, 0))
    assert not torch.equal(draw(first, 0), draw(first, 1))
