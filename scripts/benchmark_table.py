"""Tables of a comparison at its budgets, as Markdown: python scripts/benchmark_table.py FOLDER ...

Of each target the best prompt within the budget counts: the highest honest LCS, then the lowest
discrete cross-entropy, read from the evaluations that had cost no more than the budget. Folders
are those of `python -m dlmi compare`; the cells of all of them are one comparison.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Row = dict[str, Any]


def read_cells(folders: Iterable[str]) -> dict[tuple[int, int], dict[str, list[Row]]]:
    """Rows by size (M, N), then by the method's label; each with its cell's budgets."""
    sizes: dict[tuple[int, int], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        for path in sorted(Path(folder).glob("*/cell.json")):
            cell = json.loads(path.read_text(encoding="utf-8"))
            if not cell.get("is_done"):
                continue
            lines = (path.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()
            for row in map(json.loads, lines):
                row["budgets"] = cell["budgets"]
                size = len(row["target_ids"]), len(row["prompt_ids"])
                sizes[size][cell["label"]].append(row)
    return sizes


def within(row: Row, budget: int) -> tuple[float, float]:
    """The best LCS and the lowest discrete cross-entropy within a budget."""
    points = [p for p in row["trace"] if p["token_passes"] <= budget]
    return max(p["lcs"] for p in points), min(p["discrete_loss"] for p in points)


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def describe(rows: dict[str, list[Row]]) -> str:
    """A line per method: LCS at each budget, exact ones, cross-entropy by k, seconds."""
    some = next(iter(rows.values()))
    budgets: list[int] = some[0]["budgets"]
    ks = sorted({row["k"] for row in some})
    head = ["method", "rows", *(f"LCS at {b:,}" for b in budgets), "exact"]
    head += [*(f"CE, k={k}" for k in ks), "CE", "seconds"]
    body = []
    for label, mine in sorted(rows.items(), key=lambda item: mean_lcs(item[1], budgets[-1])):
        losses = {k: [within(r, budgets[-1])[1] for r in mine if r["k"] == k] for k in ks}
        exact = sum(within(r, budgets[-1])[0] == 1 for r in mine)
        line = [label, len(mine), *(f"{mean_lcs(mine, b):.3f}" for b in budgets), exact]
        line += [f"{mean(losses[k]):.2f}" for k in ks]
        line += [f"{mean(x for k in ks for x in losses[k]):.2f}"]
        line += [f"{mean(r['seconds'] for r in mine):.0f}"]
        body.append(line)
    return table(head, body)


def mean_lcs(rows: list[Row], budget: int) -> float:
    """Over rows, within a budget."""
    return mean(within(row, budget)[0] for row in rows)


def overall(sizes: dict[tuple[int, int], dict[str, list[Row]]]) -> str:
    """A line per method with rows of every size: the mean over sizes, and the best one's lead."""
    labels = set.intersection(*(set(rows) for rows in sizes.values()))
    means = {
        label: mean(mean_lcs(rows[label], rows[label][0]["budgets"][-1]) for rows in sizes.values())
        for label in labels
    }
    best = max(means.values(), default=0.0)
    lines = sorted(means.items(), key=lambda item: item[1])
    body = [[label, f"{m:.3f}", f"{best / m:.2f}" if m else "-"] for label, m in lines]
    return table(["method", "mean LCS over sizes", "best / this"], body)


def floors(rows: dict[str, list[Row]]) -> str:
    """The LCS of prompts that were not optimised."""
    every = [row for mine in rows.values() for row in mine]
    names = ("no_prompt", "random_prompt", "copy_prompt")
    found = {n: mean(r["lcs_matrix"][n]["free_greedy"] for r in every) for n in names}
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in found.items())


if __name__ == "__main__":
    cells = read_cells(sys.argv[1:])
    for (target_length, prompt_length), by_label in sorted(cells.items()):
        print(f"\nM={target_length}, N={prompt_length}. Floors (LCS): {floors(by_label)}.\n")
        print(describe(by_label))
    if len(cells) > 1:
        print(f"\nAt the whole budget:\n\n{overall(cells)}")
