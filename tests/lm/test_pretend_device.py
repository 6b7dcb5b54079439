"""Runs on a device that is not the CPU and refuses its tensors, as a GPU does."""

import concurrent.futures
import json
import multiprocessing

import pytest
import torch
from helpers import pretend_device
from helpers.methods import METHODS, make_inverter
from lightning.pytorch import Trainer
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlmi import TargetDataModule
from dlmi.targets.sources import ByRank

ELSEWHERE = ("seconds", "device")  # what may differ


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


@pytest.mark.parametrize("what", ["sum", "product", "choice", "generator"])
def test_what_is_on_two_devices_is_refused(what, elsewhere):
    with pytest.raises(RuntimeError, match="device"):
        elsewhere(mix, what)
