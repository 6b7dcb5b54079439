"""What a claim's rule looks at: one group's rows through one of the two LCS metrics.

Which of the paper's methods a series is follows from its settings, never from its label.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dlmi.report.estimates import (
    Estimate,
    Measure,
    as_in_code_lcs,
    differences,
    estimate,
    honest_lcs,
)
from dlmi.report.loading import Axis, Group, Series, last_point
from dlmi.report.method_names import Role, paper_role
from dlmi.report.naming import budget_name

# A budget: what it is counted in, and how much.
Budget = tuple[Axis, float]


@dataclass(frozen=True)
class Scene:
    """One group, looked at through one of the two metrics.

    Attributes:
        group: The rows.
        lcs: The metric, by budget.
        current_lcs: The same of the prompt of the moment, not of the best so far.
    """

    group: Group
    lcs: Callable[[Axis, float], Measure]
    current_lcs: Callable[[Axis, float], Measure]

    def budgets(self) -> list[Budget]:
        """From small to large."""
        axis, values = self.group.budgets
        return [(axis, at) for at in values]

    def find_all(self, role: Role, length: int) -> list[Series]:
        """Every series that is this method of the paper."""
        return [s for s in self.group.series if s.prompt_length == length and role_of(s) == role]

    def find(self, role: Role, length: int, tau: float | None = None) -> Series | None:
        """The series that is this method of the paper; of several, tau0 = 100, then most rows."""
        found = [s for s in self.find_all(role, length) if tau is None or tau_of(s) == tau]
        return max(found, key=lambda s: (tau_of(s) == 100, len(s.rows)), default=None)

    def settings(self) -> Iterator[tuple[int, Budget]]:
        """Every N at every budget."""
        for length in self.group.prompt_lengths:
            for budget in self.budgets():
                yield length, budget

    def difference(
        self, first: Series | None, second: Series | None, budget: Budget
    ) -> tuple[str, Estimate] | None:
        """First minus second, paired by target and seed, with its name."""
        if first is None or second is None or first is second:
            return None
        found = estimate(differences(first.rows, second.rows, self.lcs(*budget)).values())
        name = f"{first.label} - {second.label} at {place(first.prompt_length, budget)}"
        return None if found is None else (name, found)


def honest_scene(group: Group) -> Scene:
    """Best discrete prompt within the budget, free greedy decode."""
    return Scene(group, honest_lcs, _current_honest_lcs)


def as_in_code_scene(group: Group) -> Scene:
    """The relaxed prompt under the training decode."""
    return Scene(group, as_in_code_lcs, as_in_code_lcs)


def role_of(series: Series) -> Role | None:
    """Which of the paper's methods a series is."""
    return paper_role(series.rows[0].method, series.rows[0].settings)


def tau_of(series: Series) -> float | None:
    """Its tau0, or its fixed tau."""
    settings = series.rows[0].settings
    value = settings.get("tau0", settings.get("tau"))
    return float(value) if isinstance(value, int | float) else None


def place(length: int, budget: Budget) -> str:
    """N and budget in words."""
    return f"N={length}, {budget_name(*budget)}"


def _current_honest_lcs(axis: Axis, at: float) -> Measure:
    return lambda row: last_point(row, axis, at).lcs
