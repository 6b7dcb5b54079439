"""A gradient study along a run."""

import dataclasses
import time

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dlmi import InputError, Inverter
from dlmi.gradient_rows import read_gradient_rows
from dlmi.gradients.callback import GradientStudy
from dlmi.gradients.estimators import ESTIMATORS
from dlmi.lm.forward import Forward
from dlmi.methods import DLMI, GBDA, GCG, REINFORCE, Refined
from dlmi.targets.sources import Sharing

SMALL = DLMI(1.0, num_samples=2)
FEW = {"variance_every": 2, "bias_every": 4, "draws": 3, "truth_samples": 12, "truth_blocks": 3}
RUNS = {
    "DLMI": SMALL,
    "GBDA": GBDA(tau=2.0, tau_end=0.5, num_samples=2),
    "REINFORCE": REINFORCE(num_samples=2),
}


def outcome(row):
    """All of a result row but its times."""
    values = dataclasses.asdict(row)
    del values["seconds"]
    trace = [dataclasses.replace(point, seconds=0.0) for point in row.trace]
    return {**values, "trace": trace}


def run(method, **options):
    return Inverter(method, **{"prompt_length": 3, "steps": 5, "eval_every": 2, **options})


@pytest.mark.parametrize("name", RUNS)
def test_a_fit_does_not_notice_that_it_is_studied(name, data, fit, tmp_path):
    names = list(ESTIMATORS) if name == "DLMI" else ["reinforce", "gs_shared_tau1", "gumbel_rao"]
    targets, same_targets = (data(k=(1, 2, 3), per_k=1) for _ in range(2))
    torch.manual_seed(3)
    bare = fit(run(RUNS[name]), targets)
    after_bare = torch.get_rng_state()
    torch.manual_seed(3)
    studied = fit(run(RUNS[name]), same_targets, callbacks=[GradientStudy(names, **FEW)])
    assert {i: outcome(r) for i, r in studied.items()} == {i: outcome(r) for i, r in bare.items()}
    assert torch.equal(torch.get_rng_state(), after_bare)
    rows, notes = read_gradient_rows(tmp_path)
    assert not notes
    assert len({r.key for r in rows}) == len(rows)
    by_target = {target_id: r.steps for target_id, r in studied.items()}
    states = {(i, s) for i, steps in by_target.items() for s in range(0, steps, 2)}
    assert {(r.target_id, r.step) for r in rows} == states
    assert len(rows) == len(states) * len(names)
    for r in rows:
        assert (r.truth is not None) == (r.step % 4 == 0)
        assert (r.tau is None) == (r.estimator in ("REINFORCE", "RLOO"))
        assert r.variance_max.value > 0
        assert r.bias_max.value is None or r.truth["kind"] == "rloo"


def test_a_study_spends_nothing_of_a_token_budget(data, fit, tmp_path):
    """As much is left for the run, and its fluency penalty is part of what is differentiated."""
    options = {"token_budget": 200, "steps": 100, "fluency": 0.3}
    bare = fit(run(SMALL, **options), data(per_k=1))
    studied = fit(
        run(SMALL, **options), data(per_k=1), callbacks=[GradientStudy(["gs_tau1"], **FEW)]
    )
    assert {i: outcome(r) for i, r in studied.items()} == {i: outcome(r) for i, r in bare.items()}
    assert all(r.stop_reason == "budget" and r.steps < 100 for r in bare.values())
    assert read_gradient_rows(tmp_path)[0]


def test_time_of_a_study_is_not_charged_to_the_targets(data, fit, monkeypatch):
    now = 0.0

    def slow(self, *arguments):
        nonlocal now
        now += 100.0

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(GradientStudy, "_write_rows", slow)
    rows = fit(run(SMALL), data(per_k=1), callbacks=[GradientStudy(**FEW)])
    assert now >= 200
    assert [r.seconds for r in rows.values()] == [0.0, 0.0]


def test_passes_of_a_study_are_not_compiled(data, fit, tmp_path, monkeypatch):
    """A run's choice of shape is its own; and what it compiles is again after a study."""
    compiled = []

    def compile_nothing(self, inputs_embeds, keep):
        compiled.append(len(inputs_embeds))
        return self._run(inputs_embeds, keep)

    monkeypatch.setattr(Forward, "_run_compiled", compile_nothing)
    fit(run(SMALL), data(per_k=1, compile=True))
    bare, compiled[:] = list(compiled), []
    study = GradientStudy(["gs_tau1"], **FEW)
    fit(run(SMALL), data(per_k=1, compile=True), callbacks=[study])
    assert compiled == bare
    assert bare
    assert read_gradient_rows(tmp_path)[0]


@pytest.mark.parametrize("kind", ["exact", "conditional", "as_in_code"])
def test_other_truths_in_a_fit(kind, data, fit, tmp_path):
    study = GradientStudy(["rloo", "gs_tau1"], 4, 4, 4, kind, 12, 3, coordinates=10)
    fit(run(SMALL, prompt_length=2), data(per_k=1), callbacks=[study])
    rows, _ = read_gradient_rows(tmp_path)
    assert {r.truth["kind"] for r in rows} == {kind}
    assert {r.truth["coordinates"] for r in rows} == {10 if kind == "conditional" else None}
    assert all(r.bias_max.value > 0 for r in rows)
    assert {r.trajectory for r in rows} == {"GS D+L tau0=1"}


def test_a_resumed_fit_measures_no_state_twice(data, fit, tmp_path):
    def go(**options):
        study = GradientStudy(["gs_tau1"], 2, 100, 3, truth_samples=12, truth_blocks=3)
        keep = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=2, save_last=True)
        options = {"callbacks": [study, keep], "enable_checkpointing": True, **options}
        fit(run(SMALL), data(per_k=1), **options)
        return read_gradient_rows(tmp_path)[0]

    first = go(max_steps=3)
    rows = go(ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert len(rows) > len(first)
    assert len({r.key for r in rows}) == len(rows)


def test_runs_that_cannot_be_studied_are_refused(data, fit, tmp_path):
    cases = [
        (run(GCG(search_width=4, topk=4)), {}, "DLMI, GBDA or REINFORCE"),
        (run(Refined(SMALL)), {}, "DLMI, GBDA or REINFORCE"),
        (run(SMALL, prompt_length=9), {"truth": "exact"}, "at most 65536 prompts"),
        (run(DLMI(num_samples=1)), {}, "without RLOO"),
        (run(DLMI(teacher_forcing=False, next_token_tau=1.0)), {}, "next_token_tau. to be unset"),
    ]
    for inverter, options, message in cases:
        with pytest.raises(InputError, match=message):
            fit(inverter, data(), callbacks=[GradientStudy(**options)])
    shared = {"texts": ["w1 w2", "w3"], "share": Sharing()}
    with pytest.raises(InputError, match="data.share"):
        fit(run(SMALL), data(**shared), callbacks=[GradientStudy()])
    with pytest.raises(InputError, match="to name some of reinforce, "):
        GradientStudy(["gs_tau2"])
    (tmp_path / "gradients.jsonl").write_text("")
    with pytest.raises(InputError, match="exists"):
        fit(run(SMALL), data(), callbacks=[GradientStudy(**FEW)])
