"""Real runs in processes of their own, to be killed, starved and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlmi import read_rows
from dlmi.results import count_finished

ROOT = Path(__file__).parent.parent
RUN = Path("lightning_logs") / "version_0"
# Twelve targets of 60 steps: long enough to be cut off, short enough to be run often.
SETTINGS = {"prompt_length": 5, "steps": 60, "eval_every": 5, "tau0": 1.0, "num_samples": 2}
TARGETS = {"dtype": "float64", "k": (3,), "per_k": 12, "target_length": 4, "batch_size": 2}


def fit_flags(lm, *more):
    """The same run as `DLMI(**SETTINGS)` on `TARGETS`, on the command line."""
    flags = ["fit", "--model", "DLMI", "--data.lm", str(lm), "--trainer.accelerator", "cpu"]
    for name, value in SETTINGS.items():
        flags += [f"--model.{name}", str(value)]
    for name, value in TARGETS.items():
        flags += [f"--data.{name}", str(list(value) if isinstance(value, tuple) else value)]
    return [*flags, "--checkpoint.every_n_steps", "10", *map(str, more)]


def start(arguments, cwd, launcher=("-m", "dlmi"), prefix=(), **environment):
    """A process group of its own, so that all its ranks can be killed at once."""
    command = [*prefix, sys.executable, *launcher, *map(str, arguments)]
    names = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **names, **environment},
        start_new_session=True,
        **pipes,
    )


def finish(process, exit_code=0, seconds=240):
    """Its output, once it has ended as expected and without a traceback."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill_all(process)
        pytest.fail(f"still running after {seconds} s: {process.communicate()}")
    assert process.returncode == exit_code, (output, errors)
    assert "Traceback" not in errors, errors
    return output, errors


def wait_for_rows(process, folder, count, seconds=240):
    """Until that many targets are done with."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if count_finished(folder) >= count:
            return
        time.sleep(0.02)
    kill_all(process)
    pytest.fail(f"no {count} rows: {process.communicate()}")


def kill_all(process):
    """SIGKILL for every rank."""
    os.killpg(process.pid, signal.SIGKILL)


def children(process):
    """Process ids of the other ranks that rank 0 has started."""
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
