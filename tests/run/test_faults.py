"""Faults that really happen here: kills, signals, a full disk, cut files, NaN."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.subprocess_runs import (
    HANGS,
    ROOT,
    RUN,
    children,
    finish,
    fit_flags,
    kill_all,
    make_run,
    outcome,
    outcome_in,
    start,
    start_and_pause,
    wait_for_rows,
)
from safetensors.torch import load_file, save_file

from dlmi import InputError, load_lm, read_rows
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.run.callbacks.results import ResultWriter, lock_folder, merge_if_last
from dlmi.run.checkpoints import find_checkpoints, previous, read_checkpoint


def resume(model_folder, tmp_path, *more):
    flags = ["--trainer.logger.init_args.version", "0", "--continue_run", "true", *more]
    return finish(start(fit_flags(model_folder(), *flags), tmp_path))


# SIGKILL


@pytest.mark.parametrize(
    ("workers", "lives"), [(2, (3,)), pytest.param(1, (1, 6), marks=pytest.mark.slow)]
)
def test_killed_at_random_moments(workers, lives, model_folder, tmp_path, undisturbed):
    """No finished row is lost, none is there twice, the rest is as if nothing had happened."""
    flags = fit_flags(model_folder(), "--trainer.devices", workers, "--continue_run", "true")
    flags += ["--trainer.logger.init_args.version", "0"]
    dice = random.Random(workers)
    known = set()
    for rows in lives:
        process = start(flags, tmp_path)
        wait_for_rows(process, tmp_path / RUN, rows)
        time.sleep(dice.uniform(0, 0.5))
        kill_all(process)
        process.communicate()
        found = {r.target_id for r in read_rows(tmp_path / RUN, tolerate_cut=True)}
        assert known <= found
        known = found
    output, _ = resume(model_folder, tmp_path, "--trainer.devices", workers)
    assert f"goes on: {len(known)} targets are done" in output
    assert outcome_in(tmp_path / RUN) == undisturbed


# Signals that ask


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_all_workers(signum, model_folder, tmp_path):
    process, go_on = start_and_pause(fit_flags(model_folder(), "--trainer.devices", 2), tmp_path)
    process.send_signal(signum)  # worker 0 alone
    go_on()
    _, errors = finish(process, exit_code=128 + signum)
    assert "Resume with" in errors
    assert len(find_checkpoints(tmp_path / RUN / "checkpoints")) == 2
    assert "interrupted" in {row.stop_reason for row in read_rows(tmp_path / RUN)}


def test_slurm_queues_the_job_again_and_it_goes_on(model_folder, tmp_path, undisturbed):
    """SIGUSR1 comes before the time is up; the same command is then run once more."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n')
    (tools / "scontrol").chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "invert", "SLURM_NTASKS": "1"}
    job |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    job |= {"PATH": f"{tools}:{os.environ['PATH']}"}
    process, go_on = start_and_pause(fit_flags(model_folder()), tmp_path, **job)
    process.send_signal(signal.SIGUSR1)
    go_on()
    finish(process)
    assert (tools / "calls").read_text() == "requeue 4711\n"
    assert "interrupted" in {row.stop_reason for row in read_rows(tmp_path / RUN)}
    output, _ = finish(start(fit_flags(model_folder()), tmp_path, **job, SLURM_RESTART_COUNT="1"))
    assert "goes on" in output
    assert outcome_in(tmp_path / RUN) == undisturbed
    assert (tools / "calls").read_text() == "requeue 4711\n"


# Workers that die


@pytest.mark.parametrize("victim", [0, 1])
def test_one_worker_is_killed_and_the_others_finish(victim, model_folder, tmp_path, undisturbed):
    """Without worker 0, which counts, they finish what they have in flight."""
    process, go_on = start_and_pause(fit_flags(model_folder(), "--trainer.devices", 2), tmp_path)
    [other] = children(process)
    os.kill([process.pid, other][victim], signal.SIGKILL)
    go_on()
    if victim == 1:
        _, errors = finish(process, exit_code=1)
        assert "Worker 1 of 2 has ended (killed by SIGKILL)" in errors
        assert "Resume with" in errors
        assert 10 <= len(outcome_in(tmp_path / RUN)) < 12
    else:
        _, errors = process.communicate(timeout=HANGS)  # worker 1 has the same pipe
        assert process.returncode == -signal.SIGKILL
        assert "Traceback" not in errors
        output, _ = resume(model_folder, tmp_path, "--trainer.devices", "1")
        assert "goes on" in output
        assert outcome_in(tmp_path / RUN) == undisturbed


def test_whoever_ends_last_merges(data, fit, tmp_path):
    rows = list(fit(make_run(steps=2), data(per_k=1)).values())
    (tmp_path / "results.jsonl").write_text(rows[0].to_json_line())
    half = rows[0].to_json_line()[:100]  # its worker was killed
    (tmp_path / "results.worker1.jsonl").write_text(rows[1].to_json_line() + half)
    with lock_folder(tmp_path, ".lock.worker2"):
        merge_if_last(tmp_path)
        assert (tmp_path / "results.worker1.jsonl").exists()
    merge_if_last(tmp_path)
    assert not (tmp_path / "results.worker1.jsonl").exists()
    assert outcome_in(tmp_path) == outcome(rows)


# Disks that are full


FULL = {  # kilobytes of a disk, flags, and what is said when it is full
    "row": (96, ["--trainer.logger", "false"], "results.jsonl could not be written"),
    "checkpoint": (200, ["--checkpoint.every_n_steps", "1"], "last.ckpt could not be written"),
    "events": (48, [], "the disk is full"),  # TensorBoard fills it
}
ONE_AFTER_THE_OTHER = """
import json, sys
from dlmi.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        print("exit code", end.code, file=sys.stderr)
"""


def test_a_full_disk_ends_the_run_with_a_line(model_folder, tmp_path):
    """What was written before is copied out of the small disks by the same shell and read."""
    mounts, runs = [], []
    for name, (kilobytes, flags, _) in FULL.items():
        disk = tmp_path / "disks" / name
        disk.mkdir(parents=True)
        mounts.append(f'mount -t tmpfs -o size={kilobytes}k none "{disk}"')
        has_logger = "--trainer.logger" not in flags
        where = (
            "--trainer.logger.init_args.save_dir" if has_logger else "--trainer.default_root_dir"
        )
        flags = ["--checkpoint.every_n_steps", 100000, *flags, where, disk]
        runs.append(fit_flags(model_folder(), *flags, "--data.targets.per_k", 60))
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, mounts[0]]).returncode:
        pytest.skip("needs a system that lets a user mount a file system of their own")
    rescued = tmp_path / "rescued"
    script = " && ".join([*mounts, '"$@"', f'cp -r "{tmp_path / "disks"}" "{rescued}"'])
    launcher = ("-c", ONE_AFTER_THE_OTHER)
    process = start([json.dumps(runs)], tmp_path, launcher, prefix=[*prefix, script, "sh"])
    _, errors = finish(process)
    lines = errors.splitlines()
    assert lines[1::2] == ["exit code 1"] * len(FULL)
    for line, (_, _, said) in zip(lines[::2], FULL.values(), strict=True):
        assert line.startswith("dlmi: stopped: ")
        assert said in line
    rows = read_rows(rescued / "row")
    assert rows
    assert {row.stop_reason for row in rows} <= {"solved", "budget"}
    [checkpoint] = find_checkpoints(rescued / "checkpoint" / RUN / "checkpoints")
    assert read_checkpoint(checkpoint)["inversion"]["slots"]


# Files that are cut


@pytest.fixture
def interrupted(data, fit, tmp_path):
    """A run that ended early, with two checkpoints, and what resumes it."""

    def run(**options):
        return fit(
            make_run(steps=20),
            data(per_k=2),
            callbacks=[ResultWriter(), RunCheckpoint(every_n_steps=5)],
            enable_checkpointing=True,
            default_root_dir=tmp_path / "run",
            **options,
        )

    run(max_steps=12)
    return run, tmp_path / "run" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_checkpoint_cut_short_gives_way_to_the_one_before(keep, interrupted, data, fit):
    run, path = interrupted
    size = path.stat().st_size
    os.truncate(path, keep if isinstance(keep, int) else int(keep * size))
    with pytest.warns(UserWarning, match="the checkpoint before it is used"):
        rows = run(ckpt_path=path)
    assert outcome(rows.values()) == outcome(fit(make_run(steps=20), data(per_k=2)).values())


def test_without_one_before_it_is_refused(interrupted):
    run, path = interrupted
    os.truncate(path, 1000)
    previous(path).unlink()
    with pytest.raises(InputError, match="to be a whole checkpoint of dlmi"):
        run(ckpt_path=path)


BREAKS = {
    "slots": lambda saved: saved.update(slots=[3]),
    "finished_ids": lambda saved: saved.update(finished_ids=None),
    "no step": lambda saved: saved["slots"][0].pop("step"),
    "step": lambda saved: saved["slots"][0].update(step="many"),
    "cost": lambda saved: saved["slots"][0].update(cost={"forward": "a", "backward": 1}),
    "best": lambda saved: saved["slots"][0].update(best={"lcs": 1.0}),
    "trace": lambda saved: saved["slots"][0].update(trace=[{}]),
    "loss": lambda saved: saved["slots"][0].update(loss=[1.0]),
    "rng": lambda saved: saved["slots"][0].update(rng=torch.zeros(3)),
    "trained_on": lambda saved: saved["slots"][0].update(trained_on=["nobody"]),
    "params": lambda saved: saved["slots"][0].update(params={"Z": 3.0, "Phi": None}),
    "shape": lambda saved: saved["slots"][0]["params"].update(Z=torch.zeros(1)),
    "moments": lambda saved: saved["slots"][0]["moments"]["Z"].update(exp_avg=torch.zeros(7)),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_checkpoint_that_is_wrong_inside_is_refused_in_a_line(broken, interrupted):
    run, path = interrupted
    checkpoint = torch.load(path, weights_only=True)
    BREAKS[broken](checkpoint["inversion"])
    torch.save(checkpoint, path)
    with pytest.raises(InputError, match="Expected `ckpt_path` to be a whole checkpoint") as told:
        run(ckpt_path=path)
    assert "\n" not in str(told.value)


def test_a_checkpoint_is_never_half_there(interrupted, monkeypatch):
    """A crash while writing leaves the file and the one before it as they were."""
    run, path = interrupted
    held = path.read_bytes(), previous(path).read_bytes()

    def crash(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(SystemExit):
        run(ckpt_path=path)
    assert (path.read_bytes(), previous(path).read_bytes()) == held


# NaN


@pytest.fixture
def poisoned(model_folder, tmp_path):
    """The tiny LM with a token that no prompt may hold and whose embedding is not a number."""
    folder = tmp_path / "poisoned"
    shutil.copytree(model_folder("llama_untied"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][31] = float("nan")  # the tokenizer ends at 30
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float64", "32-true"), ("float32", "bf16-mixed")]
)
def test_a_target_without_a_finite_loss_fails_alone(
    poisoned, data, fit, tmp_path, dtype, precision
):
    lines = [{"id": "bad", "ids": [5, 31, 6]}, *({"id": f"ok{i}", "ids": [4, i]} for i in (7, 8))]
    targets = tmp_path / "targets.jsonl"
    targets.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"lm": str(poisoned), "dtype": dtype, "batch_size": 3}
    rows = fit(
        make_run(), data(**options, file=targets), callbacks=[ResultWriter()], precision=precision
    )
    assert rows["bad"].stop_reason == "failed"
    assert rows["bad"].failure == "the loss is nan at step 1"
    assert rows["bad"].steps == 1
    targets.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    alone = fit(make_run(), data(**options, file=targets), precision=precision)
    del rows["bad"]
    if dtype == "float64":  # in float32 rounding differs with the number of rows
        assert outcome(rows.values()) == outcome(alone.values())
    assert {row.stop_reason for row in rows.values()} <= {"solved", "budget"}
    stored = {row.target_id: row for row in read_rows(tmp_path)}
    assert stored["bad"].failure == "the loss is nan at step 1"
    assert "NaN" not in (tmp_path / "results.jsonl").read_text()


def test_a_failed_target_is_not_tried_again(poisoned, data, fit, tmp_path):
    target = [{"id": "bad", "ids": [5, 31, 6]}]
    (tmp_path / "t.jsonl").write_text(json.dumps(target[0]))
    options = {"lm": str(poisoned), "dtype": "float32", "file": tmp_path / "t.jsonl"}
    fit(make_run(), data(**options), callbacks=[ResultWriter()])
    writer = ResultWriter()
    writer.continues = True
    fit(make_run(), data(**options), callbacks=[writer])
    assert len(read_rows(tmp_path)) == 1


def test_the_lm_itself_is_fine(poisoned):
    assert load_lm(str(poisoned)).prompt_token_ids.tolist() == list(range(31))


# All of it together, again and again


@pytest.mark.slow
def test_a_short_soak():
    """Killed three times with two workers; `scripts/soak.py` does it at length."""
    script = [sys.executable, ROOT / "scripts" / "soak.py", "--targets", "24", "--slots", "2"]
    options = ["--steps", "60", "--lives", "3", "--kill_within", "0.5"]
    ended = subprocess.run([*script, *options], capture_output=True, text=True)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    report = json.loads(ended.stdout[ended.stdout.index("{") :])
    shutil.rmtree(report["folder"])
    assert report["rows"] == 24
    assert report["deaths"] == 3
    assert report["differing"] == []
