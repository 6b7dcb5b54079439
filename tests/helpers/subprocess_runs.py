"""Real runs in processes of their own, to be killed, starved and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlmi import Inverter, read_rows
from dlmi.methods import DLMI
from dlmi.rows import count_finished

ROOT = Path(__file__).parents[2]
RUN = Path("lightning_logs") / "version_0"
# Twelve targets of 40 steps: long enough to be cut off, short enough to be run often.
METHOD = {"tau0": 1.0, "num_samples": 2}
SETTINGS = {"prompt_length": 5, "steps": 40, "eval_every": 5}
DATA = {"dtype": "float64", "batch_size": 2}
TARGETS = {"k": (3,), "per_k": 12, "length": 4}
HANGS = 900  # seconds: ten times what these runs take on a slow machine


def make_run(**settings):
    """The inverter of these runs; their data is `data(**DATA, **TARGETS)`."""
    return Inverter(DLMI(**METHOD), **{**SETTINGS, **settings})


def fit_flags(lm, *more):
    """The same run on the command line."""
    flags = ["fit", "--data.lm", str(lm), "--trainer.accelerator", "cpu"]
    flags += ["--model.method", "DLMI", "--data.targets", "ByRank"]
    groups = {"model.method": METHOD, "model": SETTINGS, "data": DATA, "data.targets": TARGETS}
    for group, options in groups.items():
        for name, value in options.items():
            text = str(list(value) if isinstance(value, tuple) else value)
            flags += [f"--{group}.{name}", text]
    return [*flags, "--checkpoint.every_n_steps", "10", *map(str, more)]


def start(arguments, cwd, launcher=("-m", "dlmi"), prefix=(), **environment):
    """A process group of its own, so that all its workers can be killed at once."""
    command = [*prefix, sys.executable, *launcher, *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    names = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **names, **environment},
        start_new_session=True,
        **pipes,
    )


def finish(process, exit_code=0, seconds=HANGS):
    """Its output, once it has ended as expected and without a traceback."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill_all(process)
        pytest.fail(f"still running after {seconds} s: {process.communicate()}")
    assert process.returncode == exit_code, (output, errors)
    assert "Traceback" not in errors, errors
    return output, errors


def start_and_pause(arguments, cwd, step=45, **environment):
    """A run all of whose workers wait before a step, and what lets them go on.

    Some targets are done by then, and every worker has others in flight.
    """
    folder = cwd / "pause"
    folder.mkdir()
    environment |= {"PAUSE_AT": str(step), "PAUSE_IN": str(folder)}
    process = start(arguments, cwd, ("-m", "helpers.pausing"), **environment)
    wait_for(
        process,
        lambda: {str(pid) for pid in [process.pid, *children(process)]} == {*os.listdir(folder)},
    )
    return process, (folder / "go").touch


def wait_for_rows(process, folder, count):
    """Until that many targets are done with."""
    wait_for(process, lambda: count_finished(folder) >= count)


def wait_for(process, is_there):
    """Until something is so, while the process runs."""
    deadline = time.monotonic() + HANGS
    while not is_there():
        if time.monotonic() > deadline or process.poll() is not None:
            kill_all(process)
            pytest.fail(f"ended or hangs: {process.communicate()}")
        time.sleep(0.02)


def kill_all(process):
    """SIGKILL for every worker."""
    os.killpg(process.pid, signal.SIGKILL)


def children(process):
    """Process ids of the other workers that worker 0 has started."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def outcome(rows):
    """What must be the same however a run went."""
    return {
        (r.target_id, r.prompt_ids, r.output_ids, r.lcs, r.best_step, r.steps, r.stop_reason)
        for r in rows
    }


def outcome_in(folder):
    """The same of a folder, in which no target may stand twice."""
    rows = read_rows(folder)
    assert len({row.target_id for row in rows}) == len(rows)
    lines = sum(path.read_text().count("\n") for path in folder.glob("results*.jsonl"))
    assert lines == len(rows)
    return outcome(rows)
