"""All results as one compact block of JSON, for the page's script.

Ten thousand rows have to load in a blink, so whatever repeats (targets, tokens, labels, settings)
stands once in a side table and rows hold its index, rows are stored by column, numbers are rounded
to what is shown, and traces are thinned.
"""

import json
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dlmi.metrics import lcs_members
from dlmi.report.loading import ReportData
from dlmi.rows import DECODES, Inversion, TracePoint

TRACE_POINTS = 64

# Inside <script> no text may end the element or open a comment; the last two end a line for some
# readers of JavaScript. All of them occur only within JSON strings, where an escape means the same.
_ESCAPED = "<>&\u2028\u2029"


class _SideTable:
    """Distinct values in order of their first use."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Hashable, int] = {}

    def place(self, key: Hashable, make: Callable[[], Any] | None = None) -> int:
        """The index of the value under `key`; a new one is made, or is the key itself."""
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(key if make is None else make())
        return self._places[key]


def page_data(data: ReportData) -> dict[str, Any]:
    """Side tables, and the columns of all rows; the scripts beside it are its only reader."""
    names = ("targets", "vocabulary", "methods", "stops", "settings", "environments", "forms")
    tables = {name: _SideTable() for name in names}
    rows = [
        _row(tables, row, group_index, series.label)
        for group_index, group in enumerate(data.groups)
        for series in group.series
        for row in series.rows
    ]
    return {
        "groups": [title for title, _ in data.titled()],
        "decodes": list(DECODES),
        **{name: table.values for name, table in tables.items()},
        "count": len(rows),
        "columns": {name: [row[name] for row in rows] for name in (rows[0] if rows else ())},
    }


def script_json(data: dict[str, Any]) -> str:
    r"""JSON that is safe within a script element.

    >>> script_json({"text": "</script>"})
    '{"text":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in _ESCAPED:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def thin_trace(trace: Sequence[TracePoint], limit: int = TRACE_POINTS) -> list[TracePoint]:
    """At most about `limit` points: the first, the last, each new best, and evenly some between."""
    if len(trace) <= limit:
        return list(trace)
    kept = {0, len(trace) - 1}
    best = trace[0].lcs
    for i, point in enumerate(trace):
        if point.lcs > best:
            best = point.lcs
            kept.add(i)
    between = limit - len(kept)
    kept |= {round((i + 1) * (len(trace) - 1) / (between + 1)) for i in range(between)}
    return [trace[i] for i in sorted(kept)]


def _row(
    tables: dict[str, _SideTable], row: Inversion, group_index: int, label: str
) -> dict[str, Any]:
    environment = {
        name: getattr(row, name) for name in ("model", "revision", "fingerprint", "dtype", "device")
    }
    environment |= row.versions
    is_exact = row.output_ids == row.target_ids
    members = [] if is_exact else lcs_members(row.target_ids, row.output_ids)
    return {
        "group": group_index,
        "target": _target(tables, row),
        "method": tables["methods"].place(label),
        "seed": row.seed,
        "lcs": _short(row.lcs),
        "asInCode": _short(row.as_in_code_lcs),
        "exact": int(row.exact),
        "steps": row.steps,
        "bestStep": row.best_step,
        "forward": row.forward_tokens,
        "backward": row.backward_tokens,
        "seconds": _short(row.seconds, 4),
        "perplexity": _short(row.prompt_perplexity, 4),
        "stop": tables["stops"].place(row.stop_reason),
        "discreteLoss": _short(row.discrete_loss, 4),
        "roundTrips": int(row.round_trips),
        "roundTripLcs": _short(row.round_trip_lcs),
        "overlap": _short(row.overlap_ratio, 3),
        "targetHit": _short(row.target_hit_ratio, 3),
        "prompt": _tokens(tables, row.prompt_ids, row.prompt_tokens),
        "promptText": row.prompt_text,
        # None where the output is the target: most rows, if all goes well.
        "output": None if is_exact else _tokens(tables, row.output_ids, row.output_tokens),
        "outputText": None if is_exact else row.output_text,
        "members": "".join("01"[is_member] for is_member in members),
        "trace": _trace(row),
        "evaluations": len(row.trace),
        "form": tables["forms"].place(tuple(row.lcs_matrix)),
        "matrix": [
            _short(scores.get(decode)) for scores in row.lcs_matrix.values() for decode in DECODES
        ],
        "diagnostics": {n: [_short(v, 3) for v in vs] for n, vs in row.diagnostics.items()},
        "settings": _named(tables["settings"], {"method": row.method, **row.settings}),
        "environment": _named(tables["environments"], environment),
    }


def _target(tables: dict[str, _SideTable], row: Inversion) -> int:
    key = (row.target_id, row.target_ids, row.target_text, row.fingerprint)
    return tables["targets"].place(
        key,
        lambda: {
            "id": row.target_id,
            "k": row.k,
            "text": row.target_text,
            "tokens": _tokens(tables, row.target_ids, row.target_tokens),
            "rankOne": _short(row.rank_one_rate, 3),
        },
    )


def _tokens(tables: dict[str, _SideTable], ids: Sequence[int], texts: Sequence[str]) -> list[int]:
    """Each token as its place in the vocabulary, which holds only tokens that occur."""
    return [tables["vocabulary"].place(pair) for pair in zip(ids, texts, strict=True)]


def _trace(row: Inversion) -> list[list[int | float | None]]:
    """Steps, honest LCS and discrete cross-entropy, as three lists."""
    points = thin_trace(row.trace)
    return [
        [point.step for point in points],
        [_short(point.lcs, 3) for point in points],
        [_short(point.discrete_loss, 3) for point in points],
    ]


def _named(table: _SideTable, values: dict[str, Any]) -> int:
    """A set of named values, each written as Python's JSON writes it (NaN and Infinity too)."""
    return table.place(
        json.dumps(values),
        lambda: {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in values.items()
        },
    )


def _short(value: float | None, digits: int = 4) -> int | float | None:
    """A number rounded to some significant digits; None for what JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded
