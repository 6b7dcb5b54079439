"""Runs on a device that is not the CPU and refuses its tensors, as a GPU does."""

import collections
import concurrent.futures
import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from helpers import pretend_device
from helpers.methods import METHODS, make_inverter
from helpers.runs import StopAfter
from lightning.pytorch import Callback, Trainer
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlmi import TargetDataModule
from dlmi.lm.packed import PackedLayout, PackedRow
from dlmi.lm.transfer import Parcel
from dlmi.methods.slot import Slot
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.run.slot_pool import SlotPool
from dlmi.targets.sources import ByRank

ELSEWHERE = ("seconds", "device")  # what may differ
# Waits for the device, or copies to it, on average or at most
MOST_OF_A_STEP, MOST_OF_AN_EVALUATION = 4, 12


def invert(lm, name, on_device):
    """Rows of a small run, as JSON; in a process of its own."""
    torch.set_num_threads(1)
    options = {"accelerator": "cpu"}
    if on_device:
        pretend_device.install()
        options = pretend_device.trainer_options()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(max_epochs=-1, **dict.fromkeys(quiet, False), **options)
    inverter = make_inverter(name, steps=6, eval_every=3)
    targets = ByRank(k=(1, 3), per_k=1, length=4)
    data = TargetDataModule(lm=lm, dtype="float64", batch_size=2, targets=targets)
    with sdpa_kernel(SDPBackend.MATH):
        trainer.fit(inverter, datamodule=data)
    assert data.lm.device.type == (pretend_device.NAME if on_device else "cpu")
    return [json.loads(row.to_json_line()) for row in inverter.finished]


class Transfers(Callback):
    """Counts what goes between host and device, for each step and each evaluation."""

    def __init__(self):
        self.steps, self.evaluations = [], []
        self.evaluated, self.outside = False, collections.Counter()

    def on_train_batch_start(self, *_):
        pretend_device.transfers.clear()
        self.evaluated = False

    def on_evaluation(self, *_):
        self.evaluated = True

    def on_step_start(self, *_):
        between = pretend_device.transfers.copy()
        pretend_device.transfers.clear()
        if self.evaluated:
            self.evaluations.append(between)
        self.outside = collections.Counter() if self.evaluated else between

    def on_train_batch_end(self, *_):
        self.steps.append(pretend_device.transfers + self.outside)


def count_transfers(lm, name, slots, planted=None):
    """Mean transfers of nine steps, and the most of an evaluation; in a process of its own."""
    torch.set_num_threads(1)
    pretend_device.install()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    counter = Transfers()
    options = {**dict.fromkeys(quiet, False), **pretend_device.trainer_options()}
    trainer = Trainer(max_epochs=-1, callbacks=[counter], **options)
    inverter = make_inverter(name, prompt_length=8, steps=12, eval_every=10)
    targets = ByRank(k=(20,), per_k=slots, length=8)
    data = TargetDataModule(lm=lm, dtype="float32", batch_size=slots, targets=targets)
    with pytest.MonkeyPatch.context() as patch:
        if planted is not None:
            holder, method, mistake = PLANTED[planted]
            right = getattr(holder, method)
            device = torch.device(pretend_device.NAME, 0)

            def wrong(*args):
                mistake(device)
                return right(*args)

            patch.setattr(holder, method, wrong)
        trainer.fit(inverter, datamodule=data)
    steps, evaluations = counter.steps[1:10], counter.evaluations[1:]
    assert len(steps) == 9
    assert evaluations
    kinds = ("to_host", "to_device")
    mean = {kind: sum(one[kind] for one in steps) / len(steps) for kind in kinds}
    return mean, {kind: max(one[kind] for one in evaluations) for kind in kinds}


# A method that runs once for each slot, in a step or in an evaluation, and a mistake in it.
PLANTED = {
    "wait": (SlotPool, "prepare", lambda device: torch.ones((), device=device).item()),
    "copy": (SlotPool, "prepare", lambda device: torch.ones(1).to(device)),
    "index": (SlotPool, "prepare", lambda device: torch.ones(2, device=device)[torch.tensor([1])]),
    "late wait": (Slot, "record", lambda device: torch.ones((), device=device).item()),
    "late copy": (Slot, "record", lambda device: torch.ones(1).to(device)),
}


def resume_elsewhere(lm, name, folder, begins_on_device):
    """Rows of a run that begins on one device and goes on on the other."""
    pretend_device.install()
    here, there = {"accelerator": "cpu"}, pretend_device.trainer_options()
    first, second = (there, here) if begins_on_device else (here, there)
    targets = ByRank(k=(1, 3), per_k=1, length=4)

    def run(options, callbacks, **how):
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(
            max_epochs=-1, default_root_dir=folder, callbacks=callbacks, **quiet, **options
        )
        inverter = make_inverter(name, steps=6, eval_every=3)
        data = TargetDataModule(lm=lm, dtype="float64", batch_size=2, targets=targets)
        with sdpa_kernel(SDPBackend.MATH):
            trainer.fit(inverter, datamodule=data, **how)
        return inverter

    run(first, [RunCheckpoint(), StopAfter(4)])
    path = Path(folder) / "checkpoints" / "last.ckpt"
    finished = run(second, [RunCheckpoint()], ckpt_path=path, weights_only=True).finished
    return [json.loads(row.to_json_line()) for row in finished]


def layout_sizes(counts):
    """Sizes that packed passes over so many rows have on the device."""
    pretend_device.install()
    parcel = Parcel(torch.device(pretend_device.NAME, 0))
    rows = [[PackedRow(5, 3)] * count for count in counts]
    layouts = [PackedLayout(own, parcel) for own in rows]
    return [(layout.tokens, *layout.size, len(layout.arrived()[2])) for layout in layouts]


def mix(what):
    """An op on tensors of both devices."""
    pretend_device.install()
    device = torch.device(pretend_device.NAME, 0)
    here, there = torch.ones(2), torch.ones(2, device=device)
    assert torch.equal((there + torch.tensor(1.0)).cpu(), here + 1)  # a number, as on a GPU
    if what == "sum":
        return there + here
    if what == "product":
        return there @ here
    if what == "choice":
        return here[there.long()]
    return torch.rand(2, device=device, generator=torch.Generator())


@pytest.fixture(scope="module")
def elsewhere():
    """A process that pretends; the device would change what others see of torch."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        yield lambda *call: pool.submit(*call).result()


def assert_close(found, expected):
    """Equal, numbers to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected.keys() - set(ELSEWHERE):
            assert_close(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    else:
        assert found == expected


@pytest.mark.parametrize("name", METHODS)
def test_rows_are_those_of_the_cpu(name, model_folder, elsewhere):
    found = elsewhere(invert, str(model_folder()), name, True)
    assert [row["device"] for row in found] == [pretend_device.NAME] * 2
    assert_close(found, invert(str(model_folder()), name, False))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_few_waits_and_copies(name, slots, model_folder, elsewhere):
    steps, evaluation = elsewhere(count_transfers, str(model_folder()), name, slots)
    assert max(steps.values()) <= MOST_OF_A_STEP, steps
    assert max(evaluation.values()) <= MOST_OF_AN_EVALUATION, evaluation


def test_an_evaluation_of_many_slots_waits_no_more(model_folder, elsewhere):
    few, many = (elsewhere(count_transfers, str(model_folder()), "dlmi", n)[1] for n in (1, 16))
    assert many == few


@pytest.mark.parametrize("planted", PLANTED)
def test_a_mistake_for_each_slot_is_counted(planted, model_folder, elsewhere):
    slots = 16 if planted.startswith("late") else 4
    steps, evaluation = elsewhere(count_transfers, str(model_folder()), "gcg", slots, planted)
    kind = "to_host" if planted.endswith("wait") else "to_device"
    if planted.startswith("late"):
        assert evaluation[kind] > MOST_OF_AN_EVALUATION
    else:
        assert steps[kind] > MOST_OF_A_STEP


@pytest.mark.parametrize("begins_on_device", [True, False])
@pytest.mark.parametrize("name", ["dlmi", "pgd", "mac", "swap_search"])
def test_a_run_resumes_on_another_device(name, begins_on_device, model_folder, elsewhere, tmp_path):
    folder, lm = str(tmp_path), str(model_folder())
    found = elsewhere(resume_elsewhere, lm, name, folder, begins_on_device)
    assert_close(found, invert(lm, name, False))


def test_packed_passes_have_few_sizes_on_a_device(elsewhere):
    counts = range(33, 65)
    found = elsewhere(layout_sizes, counts)
    assert max(len(set(sizes)) for sizes in zip(*found, strict=True)) <= 5
    padded = [tokens / (5 * n) for n, (tokens, *_) in zip(counts, found, strict=True)]
    assert min(padded) >= 1
    assert max(padded) < 1.25


@pytest.mark.parametrize("what", ["sum", "product", "choice", "generator"])
def test_what_is_on_two_devices_is_refused(what, elsewhere):
    with pytest.raises(RuntimeError, match="device"):
        elsewhere(mix, what)
