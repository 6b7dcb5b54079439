#!/usr/bin/env python
"""Compare what a token-pass costs in two checkouts: the same `fit` run in each, in turn.

    scripts/compare_commits.py OLD_FOLDER OLD_CONFIG NEW_FOLDER NEW_CONFIG --passes 2000 20000

Each config is run at both token budgets in its own folder, and the cost of a token-pass is the
difference in processor time over the difference in token-passes, so that loading counts on neither
side. Processor time on one thread is what other work on the machine disturbs least.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def processor_seconds(folder: Path, config: Path, passes: int) -> tuple[float, int]:
    """Run `fit` once; returns its processor time and the token-passes of its rows."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "-m", "dlmi", "fit", "--config", str(config.resolve())]
        command += ["--trainer.logger.init_args.save_dir", run]
        command += [_budget_option(config), str(passes)]
        with open(os.devnull, "w") as nowhere:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=nowhere, stderr=subprocess.PIPE
            )
            assert process.stderr is not None
            said = process.stderr.read().decode()
            _, status, used = os.wait4(process.pid, 0)
        files = list(Path(run).rglob("results.jsonl"))
        if status or not files:
            sys.exit(f"Expected a run in {folder} to succeed, but it ended so:\n{said[-2000:]}")
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    spent = sum(row["forward_tokens"] + row["backward_tokens"] for row in rows)
    return used.ru_utime + used.ru_stime, spent


def _budget_option(config: Path) -> str:
    """Configs of the first format have the budget among the arguments of the method."""
    is_first_format = "\n  method:" not in config.read_text()
    return "--model.init_args.token_budget" if is_first_format else "--model.token_budget"


def microseconds(folder: Path, config: Path, few: int, many: int) -> float:
    """Processor time of a token-pass."""
    (short, short_passes), (long, long_passes) = (
        processor_seconds(folder, config, passes) for passes in (few, many)
    )
    return 1e6 * (long - short) / (long_passes - short_passes)


def main() -> None:
    """Print each pair of runs, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("old_folder", "old_config", "new_folder", "new_config"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--passes", type=int, nargs=2, default=(2000, 20000), metavar="PASSES")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    ratios = []
    for _ in range(given.runs):
        old = microseconds(given.old_folder, given.old_config, *given.passes)
        new = microseconds(given.new_folder, given.new_config, *given.passes)
        ratios.append(old / new)
        print(f"old {old:.0f} us, new {new:.0f} us a token-pass: {old / new:.2f}", flush=True)
    print(f"median of {len(ratios)}: old / new = {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
