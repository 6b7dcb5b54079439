"""All results as one compact block of JSON, for the page's script.

Ten thousand rows have to load in a blink, so whatever repeats (targets, tokens, labels, settings)
stands once in a side table and rows hold its index, rows are stored by column, numbers are rounded
to what is shown, traces are thinned, and no text is stored that its tokens make up.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from dlmi.metrics import lcs_members
from dlmi.report.loading import ReportData
from dlmi.rows import DECODES, Inversion, TracePoint

TRACE_POINTS = 48

_SIDE_TABLES = (
    *("targets", "vocabulary", "methods", "stops", "settings", "environments", "forms", "steps"),
)
# Inside <script> no text may end the element or open a comment; the last two end a line for some
# readers of JavaScript. All of them occur only within JSON strings, where an escape means the same.
_ESCAPED = "<>&\u2028\u2029"


class _SideTables:
    """Distinct values by name, in order of their first use."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {name: [] for name in _SIDE_TABLES}
        self._places: dict[str, dict[Hashable, int]] = defaultdict(dict)

    def place(self, name: str, key: Hashable, value: Any = None) -> int:
        """The index of the value under `key`, which is the value itself if none is given."""
        places = self._places[name]
        if key not in places:
            places[key] = len(places)
            self.values[name].append(key if value is None else value)
        return places[key]

    def tokens(self, ids: Sequence[int], texts: Sequence[str]) -> list[int]:
        """Each token as its place in the vocabulary, which holds only tokens that occur."""
        return [self.place("vocabulary", pair) for pair in zip(ids, texts, strict=True)]

    def named(self, name: str, values: dict[str, Any]) -> int:
        """A set of named values, each written as Python's JSON writes it (NaN and Infinity too)."""
        shown = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in values.items()
        }
        return self.place(name, json.dumps(values), shown)


def page_data(data: ReportData) -> dict[str, Any]:
    """Side tables, and the columns of all rows; the scripts beside it are its only reader."""
    tables = _SideTables()
    rows = [
        {"group": number, "method": tables.place("methods", series.label), **_row(tables, row)}
        for number, group in enumerate(data.groups)
        for series in group.series
        for row in series.rows
    ]
    return {
        "groups": [title for title, _ in data.titled()],
        "decodes": list(DECODES),
        **tables.values,
        "count": len(rows),
        "columns": {name: [row[name] for row in rows] for name in (rows[0] if rows else ())},
    }


def script_json(data: dict[str, Any]) -> str:
    r"""JSON that is safe within a script element.

    >>> script_json({"text": "</script>"})
    '{"text":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in _ESCAPED})


def thin_trace(trace: Sequence[TracePoint], limit: int = TRACE_POINTS) -> list[TracePoint]:
    """At most `limit` points: the first, the last, each new best, and evenly some between.

    Where there are more new bests than that, evenly some of them.
    """
    best_so_far = list(itertools.accumulate((point.lcs for point in trace), max))
    kept = {0, len(trace) - 1}
    kept |= {i for i in range(1, len(trace)) if best_so_far[i] > best_so_far[i - 1]}
    kept = _evenly(sorted(kept), limit)
    kept |= _evenly(range(len(trace)), limit - len(kept))
    return [trace[i] for i in sorted(kept)]


def _evenly(places: Sequence[int], count: int) -> set[int]:
    """So many of them, from the first to the last."""
    if count >= len(places):
        return set(places)
    return {places[round(i * (len(places) - 1) / max(1, count - 1))] for i in range(count)}


def _row(tables: _SideTables, row: Inversion) -> dict[str, Any]:
    # Most rows say their target, if all goes well.
    is_exact = row.output_ids == row.target_ids
    members = [] if is_exact else lcs_members(row.target_ids, row.output_ids)
    points = thin_trace(row.trace)
    target = {
        "id": row.target_id,
        "k": row.k,
        "text": row.target_text,
        "tokens": tables.tokens(row.target_ids, row.target_tokens),
        "rankOne": _short(row.rank_one_rate, 3),
    }
    key = (row.target_id, row.target_ids, row.target_text, row.fingerprint)
    names = ("model", "revision", "fingerprint", "dtype", "device")
    environment = {**{name: getattr(row, name) for name in names}, **row.versions}
    settings = {name: value for name, value in row.settings.items() if name != "seed"}
    return {
        "target": tables.place("targets", key, target),
        "seed": row.seed,
        "lcs": _short(row.lcs),
        "asInCode": _short(row.as_in_code_lcs),
        "exact": int(row.exact),
        "steps": row.steps,
        "bestStep": row.best_step,
        "forward": row.forward_tokens,
        "backward": row.backward_tokens,
        "seconds": _short(row.seconds),
        "perplexity": _short(row.prompt_perplexity),
        "stop": tables.place("stops", row.stop_reason),
        "discreteLoss": _short(row.discrete_loss),
        "roundTrips": int(row.round_trips),
        "roundTripLcs": _short(row.round_trip_lcs),
        "overlap": _short(row.overlap_ratio, 3),
        "targetHit": _short(row.target_hit_ratio, 3),
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
    """None where the tokens make it up: some are parts of characters, and do not."""
    return None if text == "".join(tokens) else text


def _short(value: float | None, digits: int = 4) -> int | float | None:
    """A number rounded to some significant digits; None for what JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded
