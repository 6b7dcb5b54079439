"""The tables of a comparison, from files made by hand."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "benchmark_table.py"


def write_cell(folder, label, rows, is_done=True):
    folder.mkdir(parents=True)
    cell = {"label": label, "budgets": [10, 20], "is_done": is_done}
    (folder / "cell.json").write_text(json.dumps(cell))
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(k, *points):
    trace = [dict(zip(("token_passes", "lcs", "discrete_loss"), p, strict=True)) for p in points]
    forms = ("no_prompt", "random_prompt", "copy_prompt")
    return {
        "k": k,
        "target_ids": [1, 2],
        "prompt_ids": [3, 4, 5],
        "seconds": 4.0,
        "trace": trace,
        "lcs_matrix": {name: {"free_greedy": 0.25} for name in forms},
    }


def test_only_what_the_budget_has_paid_for_counts(tmp_path):
    first = row(1, (0, 0.0, 5.0), (10, 0.5, 4.0), (20, 0.25, 3.0), (21, 1.0, 0.5))
    second = row(6, (0, 0.0, 6.0), (11, 0.5, 5.0), (15, 1.0, 5.5))
    write_cell(tmp_path / "a" / "A-seed1", "A", [first])
    write_cell(tmp_path / "b" / "A-seed2", "A", [second])
    write_cell(tmp_path / "b" / "B-seed1", "B", [first], is_done=False)
    command = [sys.executable, SCRIPT, tmp_path / "a", tmp_path / "b"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (
        "M=2, N=3. Floors (LCS): no prompt 0.250, random prompt 0.250, copy prompt 0.250." in lines
    )
    [of_a] = [line for line in lines if line.startswith("| A ")]
    assert of_a == "| A | 2 | 0.250 | 0.750 | 1 | 3.00 | 5.00 | 4.00 | 4 |"
    assert not any(line.startswith("| B ") for line in lines)
