"""What recorded cases give now, and every difference from then, each with its reason.

`tests/golden/changes.jsonl` has a line for each recorded row that the present code gives otherwise:
the columns that differ, as they are now, and why. `python -m helpers.golden_changes`, run from
`tests/`, writes it anew; a difference that none of the reasons explains ends it with an error.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlmi.rows import Inversion
from helpers.golden import GOLDEN, make_data, make_lm, run_case

CHANGES = GOLDEN / "changes.jsonl"
TOLERANCE = 1e-6

_COLUMNS = ("prompt_ids", "output_ids", "lcs", "as_in_code_lcs", "exact", "loss", "discrete_loss")
_COLUMNS += ("best_step", "steps", "stop_reason", "round_trip_lcs", "prompt_perplexity")
_COLUMNS += ("forward_tokens", "backward_tokens", "lcs_matrix", "rank_one_rate", "diagnostics")
_POINT = ("step", "lcs", "discrete_loss", "loss", "as_in_code_lcs")

BUDGET = "A token budget is never overrun."
FIRST_EMA = "The first step of `ema` compares each sample with the others."
BEST = "The best prompt of a search is the one with most right tokens, then the best score."
SEARCH_COST = "A search pays for a prompt from its first difference on, and for a gradient once."
PREFIX_COST = "The beginning of a context is paid for, once for each target."
ADC = "ADC scores no prompt twice, and keeps as many entries of its rows as the authors' code."
ROUND_TRIP = "A swap that does not round-trip, where it must, is replaced by another."

# Where two prompts of a search differ in which is the better one.
_OTHER_BEST = ("echo_search_random/plain", "echo_search_random/prompt_bos")
_OTHER_BEST += ("echo_search_window/template", "dlmi_refined/template")
_SEARCHES = ("gcg", "echo_search", "adc_refined", "soda_refined", "dlmi_refined")


@dataclass
class Case:
    """A recorded case.

    Attributes:
        name: The row of the table of methods, and the variant.
        method: The old class.
        settings: What it was given.
        data: What the old data module was given.
        rows: The rows that came of it, by the ids of their targets.
    """

    name: str
    method: str
    settings: dict[str, Any]
    data: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_cases() -> dict[str, Case]:
    """All recorded cases by name."""
    cases: dict[str, Case] = {}
    for line in (GOLDEN / "rows.jsonl").read_text().splitlines():
        made = json.loads(line)
        name = made["case"]
        case = cases.setdefault(
            name, Case(name, made["method"], made["settings"], made["data"], {})
        )
        case.rows[made["row"]["target_id"]] = _columns(made["row"])
    return cases


def read_changes() -> dict[tuple[str, str], dict[str, Any]]:
    """The columns that are others now, by case and target."""
    lines = [json.loads(line) for line in CHANGES.read_text().splitlines()]
    return {(line["case"], line["target_id"]): line["now"] for line in lines}


class Runner:
    """Runs cases; those with the same data share one LM.

    Args:
        folder: Where LMs are saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data: dict[str, Any] = {}

    def __call__(self, case: Case) -> dict[str, dict[str, Any]]:
        """The rows of a case as they are now, by the ids of their targets."""
        key = json.dumps(case.data)
        if key not in self._data:
            lm = make_lm(case.data["lm"].strip("<>"), self._folder)
            self._data[key] = make_data(case.data, lm)
        rows = run_case(case.method, case.settings, self._data[key], self._folder)
        return {row.target_id: _columns(_plain(row)) for row in rows}


def is_same(one: Any, other: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two values of a row are equal, numbers to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[k], other[k], tolerance) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(is_same(*pair, tolerance) for pair in pairs)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * max(1.0, abs(one))
    return one == other


def changed(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """The columns that differ, as they are now."""
    found = {}
    for name, value in then.items():
        # Adam lifts the rounding of gradients that are nearly 0.
        tolerance = 10 * TOLERANCE if name == "diagnostics" else TOLERANCE
        if not is_same(value, now[name], tolerance):
            found[name] = now[name]
    return found


def reason_of(case: str, now: dict[str, Any]) -> str:
    """Why these columns of a case are others now; `ValueError` where that is not known."""
    row, variant = case.split("/")
    is_search = row.startswith(_SEARCHES)
    if row.startswith("adc"):
        return ADC
    if variant == "token_budget":
        return BUDGET
    if row == "reinforce":
        return FIRST_EMA
    if now.keys() == {"forward_tokens"}:
        return SEARCH_COST if is_search else PREFIX_COST
    if variant == "round_trip" and is_search and row != "gcg":
        return ROUND_TRIP
    if case in _OTHER_BEST:
        return BEST
    raise ValueError(f"{case} has other values for no reason: {now}")


def _plain(row: Inversion) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(row.to_json_line())
    return made


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """What is compared; a trace point costs what the row costs, so its cost is left out."""
    trace = [[point[name] for name in _POINT] for point in row["trace"]]
    return {**{name: row[name] for name in _COLUMNS}, "trace": trace}


def _changes(folder: Path) -> Iterator[dict[str, Any]]:
    run = Runner(folder)
    for name, case in read_cases().items():
        for target_id, row in run(case).items():
            if now := changed(row, case.rows[target_id]):
                reason = reason_of(name, now)
                yield {"case": name, "target_id": target_id, "reason": reason, "now": now}


def main() -> None:
    """Write the file anew."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(change) + "\n" for change in _changes(Path(folder))]
    CHANGES.write_text("".join(lines))
    print(f"{len(lines)} rows are others now: {CHANGES}", file=sys.stderr)


if __name__ == "__main__":
    main()
