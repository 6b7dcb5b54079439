"""The result row of a target, and files of rows."""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlmi.errors import InputError
from dlmi.jsonl import build, read_objects, to_line
from dlmi.metrics import lcs_members
from dlmi.old_rows import nan_for_null, upgrade
from dlmi.targets.context import Context, Example
from dlmi.text import html_code, html_table, marked_html

RESULTS_FILE = "results.jsonl"  # in a run's folder

_INTERRUPTED = re.compile(rb'"stop_reason": ?"interrupted"')

# Keys of `Inversion.lcs_matrix`: the form of the prompt, then the decode.
DECODES = ("free_greedy", "teacher_forced")
FLOORS = ("no_prompt", "random_prompt", "copy_prompt")
FORMS = ("best_so_far", "argmax", "softmax", "gumbel_sample", "best_of_8_samples", *FLOORS)


@dataclass(frozen=True)
class TracePoint:
    """The state of a target at one evaluation."""

    step: int  # optimisation steps before it
    lcs: float  # honest LCS ratio of the discrete prompt at that step, not of the best so far
    discrete_loss: float  # teacher-forced cross-entropy of the target after it; may be NaN
    loss: float | None  # training loss of the step before; None at step 0
    as_in_code_lcs: float | None  # of the relaxed prompt under the training decode
    seconds: float  # wall time in the slot so far
    token_passes: int  # cost so far
    means: dict[str, float]  # diagnostics of the method, such as `tau`, averaged over positions


@dataclass(frozen=True, kw_only=True)
class ExampleResult(Example):
    """An example, and the result of a shared prompt on it."""

    full_text: str  # the whole prompt
    output_ids: tuple[int, ...]  # what the LM says to it, greedily
    output_text: str
    lcs: float
    exact: bool
    reasoning_ids: tuple[int, ...] = ()  # what the LM wrote before the trigger, if it reasons
    reasoning_text: str = ""


@dataclass(frozen=True)
class Inversion:
    """The result of one target."""

    target_id: str
    k: int | None  # difficulty of the target, where it was generated
    target_text: str
    target_ids: tuple[int, ...]
    prompt_text: str  # the best prompt found
    prompt_ids: tuple[int, ...]  # the same as token ids: this is what was measured
    output_text: str  # what the LM says to `prompt_ids`, greedily
    output_ids: tuple[int, ...]
    lcs: float  # honest LCS ratio: discrete prompt, free greedy decode
    # LCS of the relaxed prompt under the training decode at the last step, as the authors' public
    # code logs it. Not comparable with `lcs`. Tokens beyond the horizon of a search count as wrong.
    as_in_code_lcs: float | None
    exact: bool  # whether the output is the target, token for token
    round_trips: bool  # whether the prompt's text, in a template the whole, encodes to its ids
    round_trip_lcs: float  # honest LCS ratio of the prompt after decoding and encoding
    prompt_perplexity: float | None  # of `prompt_ids` under the LM, from the second token on
    overlap_ratio: float  # share of prompt positions that hold a token of the target
    target_hit_ratio: float  # share of distinct target tokens that occur in the prompt
    loss: float | None  # training loss at the best step
    discrete_loss: float  # teacher-forced cross-entropy of the target after the best prompt
    best_step: int  # steps after which the best prompt was found
    steps: int
    stop_reason: str  # `solved`, `budget`, `failed` or `interrupted`
    failure: str | None
    seconds: float  # wall time of the target in its slot, together with the rest of its batch
    # Tokens sent through the LM for this target, evaluations included; methods are compared by
    # their sum
    forward_tokens: int
    backward_tokens: int
    seed: int  # of the run; with `target_id` it fixes the noise
    method: str
    # All arguments of the method and of the run; those of a wrapped method are below a key of
    # their own, with its name as `method`
    settings: dict[str, Any]
    model: str
    revision: str | None  # commit, wheel version or hash of the LM
    fingerprint: str  # hash over the head of each of the LM's weights
    dtype: str
    device: str
    versions: dict[str, str]  # of Python and of important packages
    target_set: str  # hash of all targets of the run, ids and tokens
    trace: tuple[TracePoint, ...]
    prompt_tokens: tuple[str, ...]  # the text of each token alone
    target_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    # LCS ratio by form of the prompt and by decode (`dlmi.scoring.prompt_forms`), at the last step;
    # empty for a target that was interrupted or failed
    lcs_matrix: dict[str, dict[str, float]]
    # Share of target tokens that the LM puts first after BoS and the true tokens before them: what
    # teacher forcing gets right with no prompt
    rank_one_rate: float | None
    diagnostics: dict[str, tuple[float, ...]]  # per position at the last evaluation, such as `tau`
    context: Context | None = None  # in a template, the fixed tokens around the prompt
    full_ids: tuple[int, ...] = ()  # in a template, the whole prompt, fixed and learned
    full_text: str = ""
    # Of a shared prompt, each example that was evaluated: `target_ids` and `output_ids` are theirs,
    # concatenated, `lcs` is their mean, and `exact` means all of them
    examples: tuple[ExampleResult, ...] = ()
    held_out: tuple[ExampleResult, ...] = ()  # the same of examples that were not learned from
    # Measures of the prompt and its output by name; None where one is not defined
    metrics: dict[str, float | None] = field(default_factory=dict)

    def to_json_line(self) -> str:
        """One line of `results.jsonl`, with null for numbers that are not finite."""
        return to_line(self)

    def _repr_html_(self) -> str:
        """A table for notebooks; output tokens outside the LCS are struck out."""
        members = lcs_members(self.target_ids, self.output_ids)
        pasted = "the same" if self.round_trips else f"LCS {self.round_trip_lcs:.2f}"
        found_by = f"{self.method}, N={len(self.prompt_ids)}, {self.seconds:.1f} s"
        return html_table(
            {
                "text": html_code(self.target_text),
                "prompt": html_code(self.prompt_text),
                "the LM says": marked_html(self.output_tokens, members),
                "pasted as text": pasted,
                "LCS": f"{self.lcs:.2f}{', exact' if self.exact else ''}",
                "found by": html_code(found_by),
            }
        )

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Inversion":
        """The inverse of `to_json_line`; raises `InputError` for a wrong type."""
        return build(cls, nan_for_null(upgrade(row)))


def results_name(worker: int) -> str:
    """Name of a worker's file; the last worker merges all into that of worker 0."""
    return f"results.worker{worker}.jsonl" if worker else RESULTS_FILE


def results_files(folder: Path) -> list[Path]:
    """All files of rows in a run's folder, worker 0 first; earlier versions named them `rank`."""
    others = [*folder.glob("results.worker*.jsonl"), *folder.glob("results.rank*.jsonl")]
    return [*folder.glob(RESULTS_FILE), *sorted(others)]


def count_finished(folder: Path) -> int:
    """The number of finished targets in a run's folder."""
    count = 0
    for path in results_files(folder):
        with contextlib.suppress(OSError):
            lines = path.read_bytes().split(b"\n")[:-1]  # the last line may be incomplete
            count += sum(_INTERRUPTED.search(line) is None for line in lines)
    return count


def best_of_each(rows: Iterable[Inversion]) -> list[Inversion]:
    """One row per target: the last finished one, else the first interrupted one."""
    kept: dict[str, Inversion] = {}
    for row in rows:
        if row.stop_reason != "interrupted" or row.target_id not in kept:
            kept[row.target_id] = row
    return list(kept.values())


def read_rows(path: Path, tolerate_cut: bool = False) -> list[Inversion]:
    """All rows of a results file, or of a run folder.

    With `tolerate_cut`, a last line that is incomplete because the run was killed is ignored.
    """
    if path.is_dir():
        files = results_files(path) or [path / RESULTS_FILE]
        return best_of_each(row for file in files for row in read_rows(file, tolerate_cut))
    try:
        found = list(read_objects(path, Inversion.from_json))
    except OSError as error:
        raise InputError(
            f"Expected RESULTS to be a results.jsonl or its run folder, but got {path} ({error})."
        ) from error
    if tolerate_cut and found and isinstance(found[-1][1], InputError):
        found.pop()
    rows = []
    for number, row in found:
        if isinstance(row, InputError):
            raise InputError(f"Expected {path}, line {number}, to be a result row, but {row}.")
        rows.append(row)
    return rows
