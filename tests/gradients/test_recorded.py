"""Studies recorded before estimators were method objects: the same numbers.

`recorded.jsonl` has rows of two studies of commit b7e9a4c on the tiny GPT-2 of `helpers.golden` in
float64: all eleven estimators along one run against a `conditional` truth, and three along their
own against the `exact` one. REINFORCE's own state of step 2 is left out: its run is another since
its first step compares with the other samples.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.golden import make_lm

from dlmi import Inverter, TargetDataModule
from dlmi.gradient_rows import STATISTICS, read_gradient_rows
from dlmi.gradients.callback import GradientStudy
from dlmi.gradients.estimators import ESTIMATORS, label
from dlmi.targets.sources import ByRank

_KEY = ("estimator", "trajectory", "target_id", "step")


def recorded(trajectory, estimator=None):
    lines = (Path(__file__).parent / "recorded.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["trajectory"] == trajectory]
    rows = [row for row in rows if estimator in (None, row["estimator"])]
    return {tuple(row[name] for name in _KEY): row for row in rows}


def compact(row):
    """A row as the file has it."""
    values = {name: getattr(row, name) for name in (*_KEY, "tau")}
    truth = row.truth
    names = ("kind", "samples", "blocks", "coordinates", "norm")
    values["truth"] = None if truth is None else [truth[name] for name in names]
    for name in STATISTICS:
        statistic = getattr(row, name)
        values[name] = [statistic.value, statistic.low, statistic.high]
    return values


def assert_same(expected, found, name=""):
    if isinstance(expected, list):
        for old, new in zip(expected, found, strict=True):
            assert_same(old, new, name)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9), name
    else:
        assert found == expected, name


def check_study(study, leader, targets, lm, fit, folder, expected, **options):
    method = replace(leader, num_samples=4, lr=0.3, teacher_forcing=options.pop("teacher_forcing"))
    data = TargetDataModule(str(lm), "float64", batch_size=2, rows_per_pass=1024, targets=targets)
    study.path = folder / "gradients.jsonl"
    fit(Inverter(method, **options), data, callbacks=[study])
    found = {tuple(getattr(r, name) for name in _KEY): r for r in read_gradient_rows(folder)[0]}
    assert expected.keys() <= found.keys()
    for key, row in expected.items():
        now = compact(found[key])
        for name, value in row.items():
            assert_same(value, now[name], f"{name} of {key}")
    return len(found)


def test_all_estimators_along_one_run(fit, tmp_path):
    leader, expected = ESTIMATORS["gs_decoupled_tau1"], recorded("GS D+L tau0=1")
    study = GradientStudy(list(ESTIMATORS), 2, 4, 5, "conditional", 48, 4, 16)
    lm, targets = make_lm("gpt2", tmp_path), ByRank((5,), per_k=1, length=3)
    options = {"prompt_length": 4, "steps": 5, "eval_every": 5, "teacher_forcing": False}
    count = check_study(study, leader, targets, lm, fit, tmp_path, expected, **options)
    assert len(expected) == count == 33


@pytest.mark.parametrize("name", ["reinforce", "gs_shared_tau100", "straight_through"])
def test_estimators_along_their_own_runs(name, fit, tmp_path):
    leader = ESTIMATORS[name]
    expected = recorded("own", label(leader))
    study = GradientStudy([name], 1, 2, 4, "exact")
    study.trajectory = "own"
    lm, targets = make_lm("gpt2", tmp_path), ByRank((5,), per_k=1, length=3)
    options = {"prompt_length": 2, "steps": 3, "eval_every": 3, "teacher_forcing": True}
    assert check_study(study, leader, targets, lm, fit, tmp_path, expected, **options) == 3
    assert len(expected) == (2 if name == "reinforce" else 3)
