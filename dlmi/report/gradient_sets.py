"""Gradient rows, set apart where they do not measure the same thing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmi.gradient_rows import GradientRow, read_gradient_rows
from dlmi.report.gradient_comparison import ks_tests
from dlmi.report.parts import Cell, ReportTable


@dataclass(frozen=True)
class GradientSet:
    """Gradient rows that may be compared.

    Attributes:
        title: What they have in common.
        rows: Over estimators, targets, seeds and steps.
    """

    title: str
    rows: tuple[GradientRow, ...]


def read_gradients(files: Sequence[Path]) -> tuple[list[GradientSet], list[str]]:
    """The rows of all files, set apart, and a note on each line that is none."""
    by_file, notes = [], []
    for file in files:
        rows, broken = read_gradient_rows(file)
        by_file.append(rows)
        notes += [f"{line}: left out, not a gradient row" for line in broken]
    return gradient_sets(by_file), notes


def gradient_sets(by_file: Sequence[Sequence[GradientRow]]) -> list[GradientSet]:
    """Rows of one LM, N, M, S, loss, decode, trajectory and kind of truth."""
    sets: dict[tuple[Any, ...], list[GradientRow]] = {}
    for rows in by_file:
        kinds = sorted({row.truth["kind"] for row in rows if row.truth is not None})
        for row in rows:
            key = (
                *(row.model, row.fingerprint, row.dtype, row.prompt_length, row.target_length),
                *(row.num_samples, row.loss, row.teacher_forcing, row.trajectory, *kinds),
            )
            sets.setdefault(key, []).append(row)
    return [GradientSet(_title(rows[0], key[9:]), tuple(rows)) for key, rows in sets.items()]


def _title(row: GradientRow, kinds: Sequence[str]) -> str:
    states = "its own run" if row.trajectory == "own" else f"a run of {row.trajectory}"
    return (
        f"{row.model.rstrip('/').split('/')[-1]}, {row.dtype}, N={row.prompt_length}, "
        f"M={row.target_length}, S={row.num_samples}, {row.loss}, "
        f"{'teacher forcing' if row.teacher_forcing else 'free run'}; states of {states}"
        f"{'; truth: ' + ', '.join(kinds) if kinds else ''}"
    )


def ks_table(sets: Sequence[GradientSet]) -> ReportTable | None:
    """Kolmogorov-Smirnov tests between estimators; None without gradient files."""
    rows = []
    for gradients in sets:
        for test in ks_tests(gradients.rows):
            cells: tuple[Cell, ...] = (
                *(gradients.title, test.statistic_name, test.first, test.second),
                *(*test.sizes, test.distance, test.p_value, test.adjusted_p_value),
            )
            rows.append(cells)
    if not rows:
        return None
    columns = (
        *("measured on", "statistic", "first", "second", "rows of the first"),
        *("rows of the second", "D", "p", "p (Holm)"),
    )
    caption = (
        "Two-sided two-sample Kolmogorov-Smirnov tests between gradient estimators, pooled over "
        "targets, seeds and steps as in the paper. Rows of one run are not independent, so small "
        "p-values are smaller than they should be."
    )
    return ReportTable("ks_tests", "Tests between estimators", caption, columns, tuple(rows))
