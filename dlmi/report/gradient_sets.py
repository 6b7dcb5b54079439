"""Gradient rows, set apart where they do not measure the same thing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmi.gradient_rows import GradientRow, read_gradient_rows
from dlmi.report.blocks import Cell, ReportTable
from dlmi.report.gradient_comparison import ks_tests


@dataclass(frozen=True)
class GradientSet:
    """Gradient rows that may be compared; the title says what they have in common."""

    title: str
    rows: tuple[GradientRow, ...]


def read_gradients(files: Sequence[Path]) -> tuple[list[GradientSet], list[str]]:
    """The rows of all files, set apart, and a note on each line that is none."""
    found = [read_gradient_rows(file) for file in files]
    notes = [f"{line}: left out, not a gradient row" for _, broken in found for line in broken]
    return gradient_sets([rows for rows, _ in found]), notes


def gradient_sets(by_file: Sequence[Sequence[GradientRow]]) -> list[GradientSet]:
    """Rows of one LM, N, M, S, loss, decode, trajectory and kind of truth."""
    sets: dict[tuple[Any, ...], list[GradientRow]] = {}
    for rows in by_file:
        kinds = ", ".join(sorted({row.truth["kind"] for row in rows if row.truth is not None}))
        for row in rows:
            states = "its own run" if row.trajectory == "own" else f"a run of {row.trajectory}"
            title = (
                f"{row.model.rstrip('/').split('/')[-1]}, {row.dtype}, N={row.prompt_length}, "
                f"M={row.target_length}, S={row.num_samples}, {row.loss}, "
                f"{'teacher forcing' if row.teacher_forcing else 'free run'}; states of {states}"
                f"{'; truth: ' + kinds if kinds else ''}"
            )
            sets.setdefault((row.model, row.fingerprint, title), []).append(row)
    return [GradientSet(title, tuple(rows)) for (_, _, title), rows in sets.items()]


def ks_table(sets: Sequence[GradientSet]) -> ReportTable | None:
    """Kolmogorov-Smirnov tests between estimators; None without gradient files."""
    lines: list[dict[str, Cell]] = [
        {
            "measured on": gradients.title,
            "statistic": test.statistic_name,
            "first": test.first,
            "second": test.second,
            "rows of the first": test.sizes[0],
            "rows of the second": test.sizes[1],
            "D": test.distance,
            "p": test.p_value,
            "p (Holm)": test.adjusted_p_value,
        }
        for gradients in sets
        for test in ks_tests(gradients.rows)
    ]
    return ReportTable.of("ks_tests", lines) if lines else None
