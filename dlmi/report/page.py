"""A report as one page that needs nothing else: no network, no server, no other file."""

import base64
import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dlmi.report.loading import Group, Loaded, Series
from dlmi.report.page_data import group_names, page_data, script_json
from dlmi.report.parts import Cell, Figure, ReportTable
from dlmi.rows import Inversion
from dlmi.text import visible
from dlmi.version import __version__

DASH = "\N{EN DASH}"

# One script in the page: each of them uses what those before it define.
SCRIPTS = ("elements.js", "details.js", "table.js")

# A file cut short in the middle can give a note for each of its lines.
SHOWN_NOTES = 200


@dataclass(frozen=True)
class Headline:
    """What one method came to in one setting.

    Attributes:
        label: The method.
        prompt_length: N.
        rows: How many results.
        exact: How many of them are exact.
        lcs: Mean honest LCS.
        as_in_code_lcs: Mean as-in-code LCS of the rows that have one.
        token_passes: Median cost.
    """

    label: str
    prompt_length: int
    rows: int
    exact: int
    lcs: float
    as_in_code_lcs: float | None
    token_passes: float

    @classmethod
    def of(cls, series: Series) -> "Headline":
        """The headline of a series."""
        rows = series.rows
        soft = [row.as_in_code_lcs for row in rows if row.as_in_code_lcs is not None]
        return cls(
            label=series.label,
            prompt_length=series.prompt_length,
            rows=len(rows),
            exact=sum(row.exact for row in rows),
            lcs=statistics.fmean(row.lcs for row in rows),
            as_in_code_lcs=statistics.fmean(soft) if soft else None,
            token_passes=statistics.median(r.forward_tokens + r.backward_tokens for r in rows),
        )


def write_page(
    path: Path, loaded: Loaded, figures: Sequence[Figure], tables: Sequence[ReportTable]
) -> None:
    """Write the page.

    Args:
        path: Of the HTML file.
        loaded: The results.
        figures: Put into the page as they are.
        tables: The same.
    """
    assets = files("dlmi.report") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    environment = Environment(
        loader=PackageLoader("dlmi.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "cell": format_cell, "data_url": _data_url}
    rows = [row for group in loaded.groups for row in group.rows]
    names = group_names(loaded.groups)
    now = datetime.now(UTC)
    html = environment.get_template("page.html.j2").render(
        policy=_policy(style, script),
        style=style,
        script=script,
        data=script_json(page_data(loaded.groups)),
        facts=_facts(loaded.groups, rows),
        groups=[(names[i], group, _headlines(group)) for i, group in enumerate(loaded.groups)],
        notes=loaded.notes[:SHOWN_NOTES],
        notes_left_out=max(0, len(loaded.notes) - SHOWN_NOTES),
        figures=figures,
        tables=tables,
        written=f"{now.day} {now:%B %Y, %H:%M} UTC",
        version=__version__,
        versions=_versions(rows),
    )
    # A file name that is not valid Unicode can stand in a note.
    path.write_text(html, encoding="utf-8", errors="backslashreplace", newline="\n")


def format_cell(value: Cell) -> str:
    """A cell of a table as it is shown.

    >>> [format_cell(value) for value in (0.12345, 12345, 1234.5, 3e-5, "a")]
    ['0.123', '12,345', '1,234.5', '3e-05', 'a']
    """
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return visible(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e9):
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and pictures that are part of the page."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_source_hash(style)}'; "
        f"script-src '{_source_hash(script)}'; base-uri 'none'; form-action 'none'"
    )


def _source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_url(svg: str) -> str:
    """As an image of its own, so that ids of several pictures cannot clash."""
    data = svg.encode("utf-8", errors="xmlcharrefreplace")
    return "data:image/svg+xml;base64," + base64.b64encode(data).decode()


def _headlines(group: Group) -> list[Headline]:
    """Best first: by exact rate, then by honest LCS."""
    headlines = [Headline.of(series) for series in group.series]
    return sorted(headlines, key=lambda h: (-h.exact / h.rows, -h.lcs))


def _facts(groups: Sequence[Group], rows: Sequence[Inversion]) -> list[tuple[str, str]]:
    """What was measured, as a number and its unit."""
    counts = [
        (len(rows), "result"),
        (len({row.model for row in rows}), "model"),
        (len({(row.target_set, row.target_id) for row in rows}), "target"),
        (len({label for group in groups for label in group.labels}), "method"),
        (len({row.seed for row in rows}), "seed"),
    ]
    return [(f"{count:,}", name if count == 1 else f"{name}s") for count, name in counts]


def _versions(rows: Sequence[Inversion]) -> list[str]:
    """Each package with every version that rows were made with."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for package, version in row.versions.items():
            found.setdefault(package, {})[version] = None
    return [f"{visible(name)} {visible(' / '.join(vs))}" for name, vs in found.items()]
