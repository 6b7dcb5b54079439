"""Converts result rows of earlier versions."""

import math
from collections.abc import Callable
from typing import Any

# Columns of a row that are metrics too; rows had no others before they had `metrics`.
_METRIC_COLUMNS = (
    *("lcs", "as_in_code_lcs", "round_trip_lcs", "prompt_perplexity", "overlap_ratio"),
    *("target_hit_ratio", "discrete_loss", "rank_one_rate"),
)
# Settings of a run, as opposed to those of its method.
_RUN_SETTINGS = (
    *("prompt_length", "steps", "token_budget", "eval_every", "prompt_bos", "allowed_tokens"),
    *("forbid_target_tokens", "fluency", "norm_gradient_scale", "seed", "precision"),
)
_MAY_BE_NAN = ("discrete_loss", "diagnostics", "means")
EXAMPLES = ("examples", "held_out")


def upgrade(row: dict[str, Any]) -> dict[str, Any]:
    """A row of any version in the present format.

    Earlier rows have no `metrics`; a context is a `frame` of `slots`; and the search after a
    relaxation is part of the relaxation's settings.
    """
    if "metrics" in row:
        return row
    settings = row.get("settings")
    refined = _refined(str(row.get("method")), settings) if isinstance(settings, dict) else {}
    return {
        **with_context(row),
        **{name: each(with_context, row[name]) for name in EXAMPLES if name in row},
        **refined,
        "metrics": {name: row[name] for name in _METRIC_COLUMNS if name in row},
    }


def with_context(row: dict[str, Any]) -> dict[str, Any]:
    """A row or an example with `context` in place of `frame`."""
    if "frame" not in row:
        return row
    names = {"slot_lengths": "blank_lengths", "head": "read_once"}
    context = row["frame"]
    if isinstance(context, dict):
        context = {names.get(name, name): value for name, value in context.items()}
    return {**row, "context": context}


def _refined(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`method` and `settings` of a relaxation that was followed by a search; else nothing."""
    after = settings.get("refine_after", 1.0)
    if not isinstance(after, int | float) or after >= 1:
        return {}
    own = {name: value for name, value in settings.items() if name not in _RUN_SETTINGS}
    return {
        "method": "Refined",
        "settings": {
            "first": {"method": method, **{n: v for n, v in own.items() if n[:7] != "refine_"}},
            "search": {"method": "SwapSearch", "width": settings.get("refine_width")},
            "after": after,
            **{name: value for name, value in settings.items() if name in _RUN_SETTINGS},
        },
    }


def nan_for_null(row: dict[str, Any]) -> dict[str, Any]:
    """A row, or a point of its trace, with NaN for null in columns that may be NaN.

    JSON has no NaN.
    """

    def numbers(value: Any) -> Any:
        if isinstance(value, list):
            return [numbers(item) for item in value]
        if isinstance(value, dict):
            return {name: numbers(item) for name, item in value.items()}
        return math.nan if value is None else value

    made = {name: numbers(row[name]) for name in _MAY_BE_NAN if name in row}
    if "trace" in row:
        made["trace"] = each(nan_for_null, row["trace"])
    return {**row, **made}


def each(change: Callable[[dict[str, Any]], dict[str, Any]], value: Any) -> Any:
    """A list with its objects changed; any other value as it is."""
    if not isinstance(value, list):
        return value
    return [change(item) if isinstance(item, dict) else item for item in value]
