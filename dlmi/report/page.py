"""A report as one page that needs nothing else: no network, no server, no other file."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dlmi.report.blocks import ASSETS, Figure, ReportTable, format_cell, render
from dlmi.report.estimates import Summary, mean_of, summarise
from dlmi.report.loading import Group, ReportData, Series
from dlmi.report.page_data import page_data, script_json
from dlmi.text import visible
from dlmi.version import __version__

# One script in the page: each of them uses what those before it define.
SCRIPTS = ("elements.js", "details.js", "table.js")

# A file cut short in the middle can give a note for each of its lines.
SHOWN_NOTES = 200


def write_page(
    path: Path,
    data: ReportData,
    figures: Sequence[Figure],
    tables: Sequence[ReportTable],
    reload_seconds: int | None = None,
) -> None:
    """Write the page, in one step: who reads it meanwhile has the old or the new one.

    It loads itself again every `reload_seconds`, if that is given.
    """
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    now = datetime.now(UTC)
    html = render(
        "page.html.j2",
        {"visible": visible, "cell": format_cell, "data_url": _data_url},
        policy=(  # only this style and this script, and pictures that are part of the page
            f"default-src 'none'; img-src data:; style-src '{_source_hash(style)}'; "
            f"script-src '{_source_hash(script)}'; base-uri 'none'; form-action 'none'"
        ),
        reload_seconds=reload_seconds,
        style=style,
        script=script,
        data=script_json(page_data(data)),
        facts=_facts(data),
        held_to=data.held_to,
        groups=[(title, group, _cards(group)) for title, group in data.titled()],
        notes=data.notes[:SHOWN_NOTES],
        notes_left_out=max(0, len(data.notes) - SHOWN_NOTES),
        figures=figures,
        tables=tables,
        written=f"{now.day} {now:%B %Y, %H:%M} UTC",
        version=__version__,
        versions=_versions(data),
    )
    scratch = path.with_suffix(".tmp")
    # A file name that is not valid Unicode can stand in a note.
    scratch.write_text(html, encoding="utf-8", errors="backslashreplace", newline="\n")
    scratch.replace(path)


def _source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_url(svg: str) -> str:
    """As an image of its own, so that ids of several pictures cannot clash."""
    data = svg.encode("utf-8", errors="xmlcharrefreplace")
    return "data:image/svg+xml;base64," + base64.b64encode(data).decode()


def _cards(group: Group) -> list[tuple[Series, Summary]]:
    """What each series came to at the last budget, best first: by exact rate, then honest LCS."""

    def order(card: tuple[Series, Summary]) -> tuple[float, float]:
        series, found = card
        return -found.exact_rows / len(series.rows), -(mean_of(found.lcs) or 0)

    return sorted(((s, summarise(s, group.budgets[-1])) for s in group.series), key=order)


def _facts(data: ReportData) -> list[tuple[str, str]]:
    """What was measured, as a number and its unit."""
    rows = data.rows
    counts = {
        "result": len(rows),
        "model": len({row.fingerprint for row in rows}),
        "target": len({(row.target_set, row.target_id) for row in rows}),
        "method": len(data.labels),
        "seed": len({row.seed for row in rows}),
    }
    return [(f"{count:,}", name if count == 1 else f"{name}s") for name, count in counts.items()]


def _versions(data: ReportData) -> list[str]:
    """Each package with every version that rows were made with."""
    found: dict[str, dict[str, None]] = {}
    for row in data.rows:
        for package, version in row.versions.items():
            found.setdefault(package, {})[version] = None
    return [f"{visible(name)} {visible(' / '.join(vs))}" for name, vs in found.items()]
