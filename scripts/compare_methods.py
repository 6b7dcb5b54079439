"""All methods on the same targets, for the same token passes: a Markdown table.

    .venv/bin/python scripts/compare_methods.py

Each method keeps its published settings except where the small budget forbids: two samples or
restarts in place of 8 or 16, and 64 candidates in place of 512 for GCG. Runs land in
`lightning_logs/compare_*`; those that are complete are not run again.
"""

import statistics
import subprocess
import sys
from pathlib import Path

from dlmi import Inversion, read_rows

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "lightning_logs"
TARGETS = ["--data.k", "[1, 6]", "--data.per_k", "2", "--data.target_length", "5"]
SHARED = ["--model.prompt_length", "10", "--model.token_budget", "12000", "--model.steps", "100000"]
TWO_SAMPLES = ["--model.num_samples", "2"]

# Name of the run, its config, and what it changes.
METHODS: dict[str, tuple[str, list[str]]] = {
    "DLMI(1)": ("dlmi_tau1", TWO_SAMPLES),
    "DLMI(100)": ("dlmi_tau100", TWO_SAMPLES),
    "DLMI(1) - TF": ("dlmi_tau1_notf", TWO_SAMPLES),
    "DLMI(100) - TF": ("dlmi_tau100_notf", TWO_SAMPLES),
    "GBDA(1)": ("gbda_tau1", TWO_SAMPLES),
    "GBDA(100)": ("gbda_tau100", TWO_SAMPLES),
    "REINFORCE": ("reinforce", TWO_SAMPLES),
    "SODA": ("soda", []),
    "GCG": ("gcg", ["--model.search_width", "64"]),
    "PEZ": ("pez", []),
    "ADC": ("adc", ["--model.restarts", "2"]),
}


def run(name: str) -> list[Inversion]:
    """The rows of one method, from its folder if it is there."""
    config, changes = METHODS[name]
    version = "compare_" + "".join(c if c.isalnum() else "_" for c in name)
    folder = RUNS / version
    if not (folder / "results.jsonl").exists():
        command = [sys.executable, "-m", "dlmi", "fit", "--config", f"configs/{config}.yaml"]
        command += [*TARGETS, "--data.batch_size", "4", *SHARED, *changes]
        command += ["--trainer.logger.init_args.version", version]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_rows(folder)


def table_row(name: str, rows: list[Inversion]) -> str:
    """One line of the table."""
    means = [
        statistics.mean(row.lcs for row in rows),
        statistics.mean(row.as_in_code_lcs or 0 for row in rows),
        # Of all evaluations: the best prompt is chosen by LCS, not by its likelihood.
        statistics.mean(min(point.discrete_loss for point in row.trace) for row in rows),
    ]
    exact = sum(row.exact for row in rows)
    steps = statistics.median(row.steps for row in rows)
    seconds = max(row.seconds for row in rows)  # the targets of a run share one batch
    cells = [name, f"{exact}/{len(rows)}", *(f"{m:.2f}" for m in means), f"{steps:g}"]
    return "| " + " | ".join([*cells, f"{seconds:.0f}"]) + " |"


def main() -> None:
    """Run what is missing and print the table."""
    print("| method | exact | honest LCS | LCS as in code | lowest discrete CE | steps | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in METHODS:
        print(table_row(name, run(name)), flush=True)


if __name__ == "__main__":
    main()
