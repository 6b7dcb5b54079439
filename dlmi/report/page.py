"""A report as one page that needs no network, no server and no other file.

So that ten thousand rows load at once, values that repeat (targets, tokens, labels, settings) are
stored once and rows hold their index, rows are stored by column, numbers are rounded to what is
shown, traces are thinned, and a text is left out where its tokens spell it.
"""

import base64
import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dlmi.metrics import lcs_members
from dlmi.report.blocks import ASSETS, Figure, ReportTable, format_cell, render, write_file
from dlmi.report.estimates import Summary, summarise
from dlmi.report.loading import Group, ReportData, Series, every_value
from dlmi.rows import DECODES, Inversion, TracePoint
from dlmi.text import visible
from dlmi.version import __version__

TRACE_POINTS = 48

# One script in the page: each of them uses what those before it define.
_SCRIPTS = ("elements.js", "details.js", "table.js")
_NUMBERS = (
    *("seed", "lcs", "as_in_code_lcs", "exact", "steps", "best_step", "seconds", "discrete_loss"),
    *("forward_tokens", "backward_tokens", "prompt_perplexity", "round_trips", "round_trip_lcs"),
    *("overlap_ratio", "target_hit_ratio"),
)
_ENVIRONMENT = ("model", "revision", "fingerprint", "dtype", "device")


def write_page(
    path: Path,
    data: ReportData,
    figures: Sequence[Figure],
    tables: Sequence[ReportTable],
    reload_seconds: int | None = None,
) -> None:
    """Write the page; with `reload_seconds` it reloads itself that often."""
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    now = datetime.now(UTC)
    html = render(
        "page.html.j2",
        {"visible": visible, "cell": format_cell, "data_url": _data_url},
        policy=(  # only this style and this script, and images that are part of the page
            f"default-src 'none'; img-src data:; style-src '{_source_hash(style)}'; "
            f"script-src '{_source_hash(script)}'; base-uri 'none'; form-action 'none'"
        ),
        reload_seconds=reload_seconds,
        style=style,
        script=script,
        data=data,
        facts={
            "result": len(data.rows),
            "model": len({row.fingerprint for row in data.rows}),
            "target": len({(row.target_set, row.target_id) for row in data.rows}),
            "method": len(data.labels),
            "seed": len({row.seed for row in data.rows}),
        },
        packed=page_data(data),
        groups=[(group, _cards(group)) for group in data.groups],
        figures=figures,
        tables=tables,
        written=f"{now.day} {now:%B %Y, %H:%M} UTC",
        version=__version__,
        versions=every_value(row.versions for row in data.rows),
    )
    write_file(path, html)


def _source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_url(svg: str) -> str:
    """A separate image, so that ids of several figures cannot clash."""
    data = svg.encode("utf-8", errors="xmlcharrefreplace")
    return "data:image/svg+xml;base64," + base64.b64encode(data).decode()


def _cards(group: Group) -> list[tuple[Series, Summary]]:
    """The results of each series at the last budget, best first."""
    cards = [(series, summarise(series, group.budgets[-1])) for series in group.series]
    return sorted(cards, key=lambda card: (-card[1].exact.mean, -card[1].lcs.mean))


class _SideTables:
    """Tables of distinct values, in order of their first use."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = defaultdict(list)
        self._indices: dict[tuple[str, Hashable], int] = {}

    def place(self, name: str, key: Hashable, value: Any = None) -> int:
        """The index of the value under `key`, which is the value itself if none is given."""
        if (name, key) not in self._indices:
            self._indices[name, key] = len(self.values[name])
            self.values[name].append(key if value is None else value)
        return self._indices[name, key]

    def tokens(self, ids: Sequence[int], texts: Sequence[str]) -> list[int]:
        """Each token as its index in the vocabulary, which holds only tokens that occur."""
        return [self.place("vocabulary", pair) for pair in zip(ids, texts, strict=True)]

    def named(self, name: str, values: dict[str, Any]) -> int:
        """Named values, written as Python's JSON writes them (NaN and Infinity too)."""
        shown = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in values.items()
        }
        return self.place(name, json.dumps(values), shown)


def page_data(data: ReportData) -> dict[str, Any]:
    """Side tables and the columns of all rows, as `assets/elements.js` reads them."""
    tables = _SideTables()
    rows = [
        {"group": number, "method": tables.place("methods", series.label), **_row(tables, row)}
        for number, group in enumerate(data.groups)
        for series in group.series
        for row in series.rows
    ]
    return {
        "groups": [group.title for group in data.groups],
        "decodes": list(DECODES),
        **tables.values,
        "count": len(rows),
        "columns": {name: [row[name] for row in rows] for name in (rows[0] if rows else ())},
    }


def thin_trace(trace: Sequence[TracePoint], limit: int = TRACE_POINTS) -> list[TracePoint]:
    """At most `limit` points: the first, the last, every new best, and others at even distances.

    With too many new bests, some of them at even distances.
    """
    best_so_far = list(itertools.accumulate((point.lcs for point in trace), max))
    new_bests = [i for i in range(1, len(trace)) if best_so_far[i] > best_so_far[i - 1]]
    kept: set[int] = set()
    for places in (sorted({0, *new_bests, len(trace) - 1}), range(len(trace))):
        chosen = np.linspace(0, len(places) - 1, min(limit - len(kept), len(places)))
        kept |= {places[i] for i in chosen.round().astype(int)}
    return [trace[i] for i in sorted(kept)]


def _row(tables: _SideTables, row: Inversion) -> dict[str, Any]:
    is_exact = row.output_ids == row.target_ids
    members = [] if is_exact else lcs_members(row.target_ids, row.output_ids)
    points = thin_trace(row.trace)
    target = {
        "id": row.target_id,
        "k": row.k,
        "text": row.target_text,
        "tokens": tables.tokens(row.target_ids, row.target_tokens),
        "rankOne": _short(row.rank_one_rate),
    }
    key = (row.target_id, row.target_ids, row.target_text, row.fingerprint)
    environment = {**{name: getattr(row, name) for name in _ENVIRONMENT}, **row.versions}
    settings = {name: value for name, value in row.settings.items() if name != "seed"}
    return {
        **{name: _short(getattr(row, name)) for name in _NUMBERS},
        "target": tables.place("targets", key, target),
        "stop": tables.place("stops", row.stop_reason),
        "prompt": tables.tokens(row.prompt_ids, row.prompt_tokens),
        "promptText": _text(row.prompt_text, row.prompt_tokens),
        "output": None if is_exact else tables.tokens(row.output_ids, row.output_tokens),
        "outputText": None if is_exact else _text(row.output_text, row.output_tokens),
        "members": "".join("01"[is_member] for is_member in members),
        "trace": [
            tables.place("steps", tuple(point.step for point in points)),
            [_short(point.lcs, 3) for point in points],
            [_short(point.discrete_loss, 3) for point in points],
        ],
        "evaluations": len(row.trace),
        "form": tables.place("forms", tuple(row.lcs_matrix)),
        "matrix": [_short(found.get(d)) for found in row.lcs_matrix.values() for d in DECODES],
        "diagnostics": {n: [_short(v, 2) for v in vs] for n, vs in row.diagnostics.items()},
        "settings": tables.named("settings", {"method": row.method, **settings}),
        "environment": tables.named("environments", environment),
    }


def _text(text: str, tokens: Sequence[str]) -> str | None:
    """None where the tokens spell it; tokens that are parts of a character do not."""
    return None if text == "".join(tokens) else text


def _short(value: float | None, digits: int = 4) -> float | None:
    """A number rounded to some significant digits; None for NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    rounded = value if isinstance(value, int) else float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded
