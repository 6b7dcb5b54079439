"""What a claim's rule looks at: rows that may be compared, through one of two metrics.

Which of the paper's methods a series is follows from its settings, never from its label.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlmi.report.estimates import Estimate, Measure, differences, estimate, mean_over_targets
from dlmi.report.loading import Budget, Group, Series
from dlmi.report.names import Role, paper_role

Metric = Callable[[Budget | None], Measure]


@dataclass(frozen=True)
class MetricView:
    """Series of one group with the same restrictions on prompts, through one metric.

    Attributes:
        group: Where they are from.
        series: Those that may be compared.
        lcs: The metric, by budget.
        current_lcs: The same of the prompt of the moment, not of the best so far.
    """

    group: Group
    series: Sequence[Series]
    lcs: Metric
    current_lcs: Metric

    @property
    def lengths(self) -> list[int]:
        """All N, ascending."""
        return sorted({series.prompt_length for series in self.series})

    def settings(self) -> Iterator[tuple[int, Budget]]:
        """Every N at every budget."""
        return ((length, budget) for length in self.lengths for budget in self.group.budgets)

    def find_all(self, role: Role, length: int) -> list[Series]:
        """Every series that is this method of the paper."""
        return [s for s in self.series if s.prompt_length == length and role_of(s) == role]

    def find(self, role: Role, length: int, tau: float | None = None) -> list[Series]:
        """The one of them with tau0 = 100, or else with the most rows, if there is any."""
        found = [s for s in self.find_all(role, length) if tau is None or tau_of(s) == tau]
        return sorted(found, key=lambda s: (tau_of(s) != 100, -len(s.rows)))[:1]

    def others(self, length: int) -> list[Series]:
        """Every series that is no kind of DLMI."""
        mine = [series for series in self.series if series.prompt_length == length]
        return [series for series in mine if series.rows[0].method != "DLMI"]

    def means(self, role: Role, length: int, budget: Budget) -> Iterator[tuple[str, Estimate]]:
        """The mean of a method of the paper, with its name."""
        for series in self.find(role, length):
            if found := mean_over_targets(series.rows, self.lcs(budget)):
                yield f"{series.label} at {place(length, budget)}", found

    def gaps(
        self, firsts: Sequence[Series], seconds: Sequence[Series], budget: Budget
    ) -> Iterator[tuple[str, Estimate]]:
        """Each first minus each second, paired by target and seed, with its name."""
        for one in firsts:
            for other in seconds:
                gaps = differences(one.rows, other.rows, self.lcs(budget)).values()
                if one is not other and (found := estimate(gaps)):
                    name = f"{one.label} - {other.label} at {place(one.prompt_length, budget)}"
                    yield name, found


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
    return f"N={length}, {budget}"
