"""The result row: one self-contained JSON line per target."""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmi.errors import InputError, RunStopped
from dlmi.frames import NO_FRAME, Example, Frame
from dlmi.json_lines import build, parse_object, read_lines
from dlmi.lm import FrozenLM
from dlmi.prompt_forms import LCSMatrix
from dlmi.slots import TracePoint
from dlmi.targets import Target
from dlmi.version import __version__

RESULTS_FILE = "results.jsonl"  # in a run's folder


@dataclass(frozen=True)
class ReadExample:
    """How a shared prompt did on one example.

    Attributes:
        id: Of the example.
        ids: What the LM was to say.
        text: The same as text.
        frame: Fixed tokens around the prompt.
        full_text: The whole prompt: what one pastes.
        output_ids: What the LM says to it, greedily.
        output_text: The same as text.
        lcs: Honest LCS ratio of that.
        exact: Whether it is the target, token for token.
        reasoning_ids: What the LM wrote before that, where it was to reason first.
        reasoning_text: The same as text; the trigger, which is in `frame`, comes after it.
    """

    id: str
    ids: tuple[int, ...]
    text: str
    frame: Frame
    full_text: str
    output_ids: tuple[int, ...]
    output_text: str
    lcs: float
    exact: bool
    reasoning_ids: tuple[int, ...] = ()
    reasoning_text: str = ""

    @property
    def example(self) -> Example:
        """What was read."""
        return Example(self.id, self.ids, self.text, self.frame)


@dataclass(frozen=True)
class Inversion:
    """What came of one target.

    Attributes:
        target_id: Which target.
        k: Its difficulty, where it was generated.
        target_text: What the LM was to say.
        target_ids: The same as token ids.
        prompt_text: The best prompt found, as text.
        prompt_ids: The same as token ids: this is what was measured.
        output_text: What the LM says to `prompt_ids`, greedily.
        output_ids: The same as token ids.
        lcs: Honest LCS ratio: discrete prompt, free greedy decode.
        as_in_code_lcs: LCS of the relaxed prompt under the training decode at the last step, as
            the authors' public code logs it. Not comparable with `lcs`. Tokens that a search has
            not read, as they are beyond its horizon, count as wrong.
        exact: Whether the output is the target, token for token.
        round_trips: Whether `prompt_text` encodes to `prompt_ids` again, in a template the whole.
        round_trip_lcs: Honest LCS ratio of the prompt after decoding and encoding.
        prompt_perplexity: Of `prompt_ids` under the LM, from the second token on.
        overlap_ratio: Share of prompt positions that hold a token of the target.
        target_hit_ratio: Share of distinct target tokens that occur in the prompt.
        loss: Training loss at the best step.
        discrete_loss: Teacher-forced cross-entropy of the target after the best discrete prompt.
        best_step: Steps after which the best prompt was found.
        steps: Steps used.
        stop_reason: `solved`, `budget`, `failed` or `interrupted`.
        failure: Why it failed, where it did.
        seconds: Wall time that the target spent in its slot, beside its batch mates.
        forward_tokens: Tokens sent forward through the LM for this target, evaluations included.
        backward_tokens: Tokens sent backward through the LM. The sum of both is the cost that
            methods are compared by.
        seed: Of the run; with `target_id` it fixes the noise.
        method: Class of the inverter.
        settings: All its arguments.
        model: Name of the LM.
        revision: Commit, wheel version or hash of the LM.
        fingerprint: Hash over the head of each of the LM's weights.
        dtype: Of the LM.
        device: Type of device.
        versions: Of the packages that matter, and of Python.
        target_set: Hash of all targets of the run, ids and tokens.
        trace: How it stood at every evaluation.
        prompt_tokens: The text of each token of `prompt_ids` alone.
        target_tokens: The same of `target_ids`.
        output_tokens: The same of `output_ids`.
        lcs_matrix: LCS ratio by form of the prompt and by decode (`dlmi.prompt_forms`), at the last
            step; `best_so_far` with `free_greedy` is `lcs`. Empty for a target that was interrupted
            or failed.
        rank_one_rate: Share of target tokens that the LM puts first after BoS and the true tokens
            before them: what teacher forcing gets right with no prompt.
        diagnostics: The method's numbers per position at the last evaluation, such as `tau`.
        frame: In a template, the fixed tokens around the prompt and the template itself.
        full_ids: In a template, the whole prompt, fixed and learned.
        full_text: The same as text: what one pastes.
        examples: Of a shared prompt, each example that was evaluated; `target_ids` and `output_ids`
            are theirs, one after the other, `lcs` is their mean, and `exact` means all of them.
        held_out: The same of examples that were not learned from.
    """

    target_id: str
    k: int | None
    target_text: str
    target_ids: tuple[int, ...]
    prompt_text: str
    prompt_ids: tuple[int, ...]
    output_text: str
    output_ids: tuple[int, ...]
    lcs: float
    as_in_code_lcs: float | None
    exact: bool
    round_trips: bool
    round_trip_lcs: float
    prompt_perplexity: float | None
    overlap_ratio: float
    target_hit_ratio: float
    loss: float | None
    discrete_loss: float
    best_step: int
    steps: int
    stop_reason: str
    failure: str | None
    seconds: float
    forward_tokens: int
    backward_tokens: int
    seed: int
    method: str
    settings: dict[str, Any]
    model: str
    revision: str | None
    fingerprint: str
    dtype: str
    device: str
    versions: dict[str, str]
    target_set: str
    trace: tuple[TracePoint, ...]
    prompt_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    lcs_matrix: LCSMatrix
    rank_one_rate: float | None
    diagnostics: dict[str, tuple[float, ...]]
    frame: Frame | None = None
    full_ids: tuple[int, ...] = ()
    full_text: str = ""
    examples: tuple[ReadExample, ...] = ()
    held_out: tuple[ReadExample, ...] = ()

    @property
    def target(self) -> Target:
        """What was to be said, and where."""
        frame = self.frame or NO_FRAME
        target = Target(self.target_id, self.target_ids, self.target_text, frame=frame)
        examples = [example.example for example in self.examples]
        return target.with_examples(examples) if examples else target

    @property
    def whole_prompts(self) -> list[tuple[str, tuple[int, ...], str]]:
        """What is read: text of the target, ids and text of the whole prompt, of each example."""
        if self.examples:
            return [(e.text, e.frame.full_ids(self.prompt_ids), e.full_text) for e in self.examples]
        full = self.full_ids or self.prompt_ids, self.full_text or self.prompt_text
        return [(self.target_text, *full)]

    def to_json_line(self) -> str:
        """One line of `results.jsonl`; numbers that are not finite are null there."""
        return json.dumps(_finite(dataclasses.asdict(self)), ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Inversion":
        """The inverse of `to_json_line`; `InputError` where a value is of another type."""
        return build(cls, row)


def _finite(value: Any) -> Any:
    """The same with None for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def describe_environment(lm: FrozenLM) -> dict[str, Any]:
    """The columns of a row that say where it was measured."""
    packages = ("torch", "lightning", "transformers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "model": lm.name,
        "revision": lm.revision,
        "fingerprint": lm.fingerprint(),
        "dtype": lm.dtype_name,
        "device": lm.device.type,
        "versions": {"dlmi": __version__, "python": platform.python_version(), **versions},
    }


def results_name(rank: int) -> str:
    """Name of a rank's file; those of other ranks than 0 are merged when all are done."""
    return f"results.rank{rank}.jsonl" if rank else RESULTS_FILE


def results_files(folder: Path) -> list[Path]:
    """All files of rows in a run's folder, rank 0 first."""
    return [*folder.glob(RESULTS_FILE), *sorted(folder.glob("results.rank*.jsonl"))]


def append_line(path: Path, line: str) -> None:
    """Add a line and wait until it is on the disk; a line that does not fit leaves no trace.

    Raises:
        RunStopped: If it cannot be written.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise RunStopped(
            f"{path} could not be written ({error.strerror}). What it held before is whole: make "
            "room, then resume the run."
        ) from error


def rewrite_rows(path: Path, rows: Iterable[Inversion]) -> None:
    """Replace the file by these rows, in one step: a crash leaves the old or the new file."""
    scratch = path.with_suffix(".jsonl.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.writelines(row.to_json_line() for row in rows)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise RunStopped(
            f"{path} could not be rewritten ({error.strerror}). It is as it was: make room, then "
            "resume the run."
        ) from error


def count_finished(folder: Path) -> int:
    """How many whole rows of targets that are done with a run's folder holds."""
    count = 0
    for path in results_files(folder):
        with contextlib.suppress(OSError):
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is cut off
            count += sum(b'"stop_reason": "interrupted"' not in line for line in lines)
    return count


def best_of_each(rows: Iterable[Inversion]) -> list[Inversion]:
    """One row per target: a finished one before an interrupted one, a later before an earlier."""
    kept: dict[str, Inversion] = {}
    for row in rows:
        if row.stop_reason != "interrupted" or row.target_id not in kept:
            kept[row.target_id] = row
    return list(kept.values())


def read_rows(path: Path, tolerate_cut: bool = False) -> list[Inversion]:
    """All rows of a results file.

    Args:
        path: The file, or the run folder that holds it, or those of several ranks.
        tolerate_cut: Ignore a last line that was only half written when the run was killed.
    """
    if path.is_dir():
        files = results_files(path) or [path / RESULTS_FILE]
        return best_of_each(row for file in files for row in read_rows(file, tolerate_cut))
    try:
        lines = list(read_lines(path))
    except OSError as error:
        raise InputError(
            f"Expected RESULTS to be a results.jsonl or its run folder, but got {path} ({error})."
        ) from error
    rows = []
    for number, line in lines:
        try:
            rows.append(Inversion.from_json(parse_object(line)))
        except InputError as error:
            if tolerate_cut and number == lines[-1][0]:
                break
            raise InputError(
                f"Expected {path}, line {number}, to be a result row, but {error}."
            ) from error
    return rows
