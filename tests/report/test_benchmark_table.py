"""The tables of a comparison, from files made by hand."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_table.py"


def write_cell(folder, label, rows, is_done=True):
    folder.mkdir(parents=True)
    cell = {"label": label, "budgets": [10, 20], "is_done": is_done}
    (folder / "cell.json").write_text(json.dumps(cell))
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(k, *points, prompt_ids=(3, 4, 5)):
    trace = [dict(zip(("token_passes", "lcs", "discrete_loss"), p, strict=True)) for p in points]
    forms = ("no_prompt", "random_prompt", "copy_prompt")
    return {
        "k": k,
        "target_ids": [1, 2],
        "prompt_ids": prompt_ids,
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


def test_methods_that_have_every_size_are_compared_over_sizes(tmp_path):
    """Each size counts the same, however many rows it has."""
    for label, small, large in (("A", (0.5, 1.0), 0.25), ("B", (0.25,), 0.25), ("C", (1.0,), None)):
        rows = [row(1, (5, lcs, 1.0)) for lcs in small]
        if large is not None:
            rows.append(row(1, (5, large, 1.0), prompt_ids=(3, 4)))
        write_cell(tmp_path / label, label, rows)
    command = [sys.executable, SCRIPT, tmp_path]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-2:] == ["| B | 0.250 | 2.00 |", "| A | 0.500 | 1.00 |"]
