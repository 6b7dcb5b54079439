"""What a claim's rule looks at: rows that may be compared, through one of two metrics.

Which of the paper's methods a series is follows from its settings, never from its label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlmi.report.estimates import Measure, NamedEstimates, differences, estimate, mean_over_targets
from dlmi.report.loading import Group, Series
from dlmi.report.names import Role, paper_role
from dlmi.report.result_files import Budget

Metric = Callable[[Budget], Measure]


@dataclass(frozen=True)
class MetricView:
    """One N at one budget of a group, through one metric."""

    group: Group
    everyone: Sequence[Series]  # of any N; their prompts are restricted alike
    length: int
    budget: Budget
    lcs: Metric
    current_lcs: Metric  # the same of the prompt of the moment, not of the best so far

    @property
    def place(self) -> str:
        """N and budget in words."""
        return f"N={self.length}, {self.budget}"

    @property
    def series(self) -> list[Series]:
        """Those of this N."""
        return [series for series in self.everyone if series.prompt_length == self.length]

    @property
    def others(self) -> list[Series]:
        """Those that are no kind of DLMI."""
        return [series for series in self.series if series.rows[0].method != "DLMI"]

    def find_all(self, *roles: Role) -> list[Series]:
        """Every series that is one of these methods of the paper."""
        return [series for series in self.series if role_of(series) in roles]

    def find(self, role: Role, tau: float | None = None) -> list[Series]:
        """The one with tau0 = 100, or else with the most rows, if there is any."""
        found = [s for s in self.find_all(role) if tau is None or tau_of(s) == tau]
        return sorted(found, key=lambda s: (tau_of(s) != 100, -len(s.rows)))[:1]

    def means(self, role: Role) -> NamedEstimates:
        """The mean of a method of the paper."""
        for series in self.find(role):
            if found := mean_over_targets(series.rows, self.lcs(self.budget)):
                yield f"{series.label} at {self.place}", found

    def gaps(self, firsts: Sequence[Series], seconds: Sequence[Series]) -> NamedEstimates:
        """Each first minus each second, paired by target and seed."""
        for one in firsts:
            for other in seconds:
                gaps = differences(one.rows, other.rows, self.lcs(self.budget)).values()
                if one is not other and (found := estimate(gaps)):
                    yield f"{one.label} - {other.label} at {self.place}", found


def role_of(series: Series) -> Role | None:
    """Which of the paper's methods a series is."""
    return paper_role(series.rows[0].method, series.rows[0].settings)


def tau_of(series: Series) -> float | None:
    """Its tau0, or its fixed tau."""
    settings = series.rows[0].settings
    value = settings.get("tau0", settings.get("tau"))
    return float(value) if isinstance(value, int | float) else None
