"""What a claim's rule looks at: rows that can be compared, through our or the authors' metric.

Which of the paper's methods a series is follows from its settings, never from its label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from dlmi.report.estimates import Measure, NamedEstimates, differences, estimate, mean_over_targets
from dlmi.report.loading import Group, Series
from dlmi.report.names import Role, paper_role, restrictions, settings_text
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
    current_lcs: Metric  # of the prompt at the last evaluation, not of the best one

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
        """Those whose method is not DLMI."""
        return [series for series in self.series if series.rows[0].method != "DLMI"]

    @property
    def measure(self) -> Measure:
        """LCS at the budget."""
        return self.lcs(self.budget)

    def find_all(self, *roles: Role) -> list[Series]:
        """Every series that is one of these methods of the paper."""
        return [series for series in self.series if role_of(series) in roles]

    def find(self, role: Role, tau: float | None = None) -> list[Series]:
        """At most one: that with tau0 = 100, otherwise that with the most rows."""
        found = [s for s in self.find_all(role) if tau is None or tau_of(s) == tau]
        return sorted(found, key=lambda s: (tau_of(s) != 100, -len(s.rows)))[:1]

    def means(
        self, members: Sequence[Series], measure: Measure | None = None, what: str = ""
    ) -> NamedEstimates:
        """The mean of each; of LCS at the budget by default."""
        place = f"N={self.length}" if measure else self.place
        for series in members:
            if found := mean_over_targets(series.rows, measure or self.measure):
                yield f"{what}{series.label} at {place}", found

    def gaps(
        self, firsts: Sequence[Series], seconds: Sequence[Series], measure: Measure | None = None
    ) -> NamedEstimates:
        """Each first minus each second, paired by target and seed; of LCS by default."""
        for one, other in product(firsts, seconds):
            gaps = differences(one.rows, other.rows, measure or self.measure).values()
            if one is not other and (found := estimate(gaps)):
                yield f"{one.label} - {other.label} at {self.place}", found


def held_to(series: Series) -> str:
    """What restricts its prompts."""
    return settings_text(restrictions(series.rows[0].settings))


def role_of(series: Series) -> Role | None:
    """Which of the paper's methods a series is."""
    return paper_role(series.rows[0].method, series.rows[0].settings)


def tau_of(series: Series) -> float | None:
    """Its tau0, or its fixed tau."""
    settings = series.rows[0].settings
    value = settings.get("tau0", settings.get("tau"))
    return float(value) if isinstance(value, int | float) else None
