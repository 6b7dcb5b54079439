"""The gradient row: one self-contained JSON line per estimator, target, seed and step."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dlmi.errors import InputError
from dlmi.jsonl import build, read_objects, to_line

FILE_NAME = "gradients.jsonl"


@dataclass(frozen=True)
class Statistic:
    """A number with its 95% confidence interval."""

    value: float | None  # None where it is not defined or hidden by noise
    low: float | None  # None without a bound
    high: float | None


UNDEFINED = Statistic(None, None, None)


@dataclass(frozen=True)
class GradientRow:
    """Statistics of an estimator's gradient with respect to Z at one state of one run.

    The intervals of statistics are over draws (and over the truth's blocks). Fields without a
    comment are as in a result row, `dlmi.rows.Inversion`.
    """

    estimator: str  # label of the measured estimator
    trajectory: str  # `own`, or the label of the estimator whose run the state is from
    target_id: str
    k: int | None
    step: int  # optimisation steps taken before the state
    seed: int
    prompt_length: int  # N
    target_length: int  # M
    num_samples: int  # samples per draw, S
    draws: int  # how many were measured
    tau: float | None  # the estimator's temperature, mean over positions; None: score function
    # How the true gradient was found: `kind`, `samples` (prompts it took), `blocks`, `coordinates`
    # (logits it knows; None for all) and `norm` (its noise-corrected norm over those). None where
    # no truth was due at this step. The kind `as_in_code` is the DLMI authors' reference, which is
    # not the true gradient.
    truth: dict[str, Any] | None
    variance_max: Statistic  # the largest variance of a logit over the draws, as in the paper
    # The largest |mean of the draws - truth| of a logit, as in the paper; includes noise of about
    # sqrt(variance_max / draws)
    bias_max: Statistic
    relative_variance: Statistic  # sum of the variances over the squared norm of the mean
    snr: Statistic  # norm of the mean over the root of the summed variances
    cosine: Statistic  # between the mean and the truth; noise may carry it beyond 1
    bias_over_norm: Statistic  # norm of the bias over that of the truth; 1 if the estimate is 0
    norm: Statistic  # of the mean gradient
    loss: str  # which loss J is the mean of
    teacher_forcing: bool  # whether the target's own prefix was fed
    model: str
    revision: str | None
    fingerprint: str
    dtype: str
    device: str
    versions: dict[str, str]

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Identifies a row in its file."""
        return (self.estimator, self.trajectory, self.target_id, self.seed, self.step)

    def to_json_line(self) -> str:
        """One line of `gradients.jsonl`."""
        return to_line(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "GradientRow":
        """The inverse of `to_json_line`; raises `InputError` for a wrong type."""
        made = build(cls, row)
        if made.truth is not None and not isinstance(made.truth.get("kind"), str):
            raise InputError("`truth`: `kind` is missing")
        return made


# Columns of a row that are statistics, in their order.
STATISTICS = tuple(field.name for field in fields(GradientRow) if field.type is Statistic)


def read_gradient_rows(path: Path) -> tuple[list[GradientRow], list[str]]:
    """The valid rows of a file or run folder, and a note for each other line: `FILE, line 7`."""
    if path.is_dir():
        path = path / FILE_NAME
    try:
        found = list(read_objects(path, GradientRow.from_json))
    except OSError as error:
        raise InputError(
            f"Expected a {FILE_NAME} or its run folder, but got {path} ({error.strerror})."
        ) from error
    notes = [f"{path}, line {number}" for number, row in found if isinstance(row, InputError)]
    return [row for _, row in found if isinstance(row, GradientRow)], notes


def refuse_used_file(path: Path) -> None:
    """Raise `InputError` if gradients were already written there."""
    if path.exists():
        raise InputError(f"Expected a folder without a {FILE_NAME}, but {path} exists.")
