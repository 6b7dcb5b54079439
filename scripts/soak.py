"""Kill a run many times, resume it each time, and compare it with an undisturbed run.

`.venv/bin/python scripts/soak.py` takes some minutes: 500 targets of a tiny LM through 8 slots on
2 workers, killed every few seconds (all, one before the others, or asked to stop by SIGTERM). It
ends with exit code 0 if every row is there, once, and equal to the undisturbed one, and if neither
the memory nor the open files of the undisturbed run grow.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

from helpers.tiny_models import make_config, make_tokenizer  # noqa: E402

from dlmi import read_rows  # noqa: E402
from dlmi.rows import count_finished  # noqa: E402

_ENOUGH_FOR_A_SLOPE = 100  # targets
METHODS = {"DLMI": {"tau0": 1, "num_samples": 2}, "SwapSearch": {"width": 4, "num_starts": 2}}
SAME = ("prompt_ids", "output_ids", "lcs", "best_step", "steps", "stop_reason", "forward_tokens")


def command(lm: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command that starts or resumes a run in a folder."""
    flags = {
        "data.lm": lm,
        "data.dtype": "float64",
        "data.targets": "ByRank",
        "data.targets.k": "[3]",
        "data.targets.per_k": options.targets,
        "data.targets.length": 4,
        "data.batch_size": options.slots,
        "model.method": options.method,
        "model.prompt_length": 5,
        "model.steps": options.steps,
        "model.eval_every": 5,
        **{f"model.method.{name}": value for name, value in METHODS[options.method].items()},
        "trainer.accelerator": "cpu",
        "trainer.devices": options.workers,
        "trainer.logger.init_args.save_dir": folder.parent.parent,
        "trainer.logger.init_args.name": folder.parent.name,
        "trainer.logger.init_args.version": folder.name,
        "continue_run": "true",
        "checkpoint.every_n_steps": 20,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "dlmi", "fit", *words]


def start(words: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start the run in its own process group."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as screen:
        return subprocess.Popen(
            words, stdout=screen, stderr=screen, env=environment, start_new_session=True
        )


def disturb(process: "subprocess.Popen[bytes]", dice: random.Random) -> str:
    """End a run: kill all workers, kill one first, or ask it to stop. Returns which."""
    workers = psutil.Process(process.pid).children()
    way = dice.choice(["all", "one", "term"])
    if way == "term":
        process.terminate()
    else:
        if way == "one":
            os.kill(dice.choice([process.pid, *(worker.pid for worker in workers)]), signal.SIGKILL)
            time.sleep(dice.uniform(0, 1))
        with contextlib.suppress(ProcessLookupError):  # they were done
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return way


def soak(words: list[str], folder: Path, log: Path, options: argparse.Namespace) -> int:
    """Run to the end, disturbed again and again; returns how often."""
    dice = random.Random(options.seed)
    lives = 0
    while True:
        before = count_finished(folder)
        process = start(words, log)
        while process.poll() is None and count_finished(folder) <= before:
            time.sleep(0.05)
        deadline = time.monotonic() + dice.uniform(0, options.kill_within)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is not None:
            if process.returncode:
                sys.exit(f"the run ended by itself with exit code {process.returncode}; see {log}")
            return lives
        if lives >= options.lives:
            process.wait()
            return lives
        lives += 1
        way = disturb(process, dice)
        print(f"life {lives}: {count_finished(folder)} targets done, ended by {way}", flush=True)


def watch(words: list[str], folder: Path, log: Path) -> "list[tuple[int, int, int]]":
    """An undisturbed run; returns samples of finished targets, bytes and open files."""
    process = start(words, log)
    samples = []
    while process.poll() is None:
        try:
            workers = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            memory = sum(worker.memory_info().rss for worker in workers)
            files = sum(worker.num_fds() for worker in workers)
            samples.append((count_finished(folder), memory, files))
        except psutil.Error:
            break
        time.sleep(0.2)
    if process.wait():
        sys.exit(f"the undisturbed run ended with exit code {process.returncode}; see {log}")
    return samples


def main() -> None:
    """Both runs, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, default="DLMI")
    parser.add_argument("--targets", type=int, default=500)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lives", type=int, default=1000, help="How often to kill at most.")
    parser.add_argument("--kill_within", type=float, default=4.0, help="Seconds after a new row.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="dlmi-soak-"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make_config("llama")).save_pretrained(place / "lm")
    make_tokenizer().save_pretrained(place / "lm")
    calm, rough = place / "runs" / "calm", place / "runs" / "rough"
    samples = watch(command(place / "lm", calm, options), calm, place / "calm.log")
    lives = soak(command(place / "lm", rough, options), rough, place / "rough.log", options)
    expected = {row.target_id: row for row in read_rows(calm)}
    lines = (rough / "results.jsonl").read_text().count("\n")
    found = {row.target_id: row for row in read_rows(rough)}
    differing = [
        (target_id, name)
        for target_id, row in expected.items()
        for name in SAME
        if target_id not in found or getattr(found[target_id], name) != getattr(row, name)
    ]
    late = np.array([s for s in samples if options.targets * 0.3 <= s[0] < options.targets])
    growth = {}
    if len(late) > 10:
        done, memory, files = late.T
        growth = {
            "kilobytes per target": float(np.polyfit(done, memory / 1024, 1)[0]),
            "megabytes": float(memory.mean() / 2**20),
            "open files per 100 targets": float(100 * np.polyfit(done, files, 1)[0]),
        }
    is_right = len(found) == lines == len(expected) == options.targets and not differing
    report = {"rows": lines, "deaths": lives, "differing": differing, **growth}
    print(json.dumps({**report, "folder": str(place)}, indent=1))
    # A row that worker 0 keeps takes some 20 kB; what grows beyond that is a leak. A slope over a
    # few targets is only the run warming up.
    is_flat = (
        options.targets < _ENOUGH_FOR_A_SLOPE
        or not growth
        or (growth["kilobytes per target"] < 100 and growth["open files per 100 targets"] < 1)
    )
    sys.exit(0 if is_right and is_flat else 1)


if __name__ == "__main__":
    main()
