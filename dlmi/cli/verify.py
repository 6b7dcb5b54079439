"""`python -m dlmi verify`: decode found prompts again, in the same or in other models."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import track

from dlmi.cli.output import check_new_file, print_table
from dlmi.cli.parser import CommandParser
from dlmi.errors import InputError
from dlmi.jsonl import to_line
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.loading import load_lm, load_tokenizer
from dlmi.lm.placement import DType, default_device, split_dtype_name
from dlmi.rows import Inversion, read_rows
from dlmi.run.data import LoadOptions
from dlmi.scoring.verification import Transfer, try_row, verify_row
from dlmi.text import visible


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser.of("verify", verify, "RESULTS [options]", {"load"})
    parser.add_class_arguments(LoadOptions, "load", skip={"quantization"})  # the rows name theirs
    return parser


def verify(
    results: Path,
    lm: str | list[str] | None = None,
    dtype: DType | list[DType] | None = None,
    as_text: bool = False,
    out: Path | None = None,
    load: LoadOptions = LoadOptions(),  # noqa: B008  # it is frozen
) -> int:
    """Load the LM and decode every prompt of a results.jsonl again, from its ids and its text.

    Exit code 1 where a recorded value does not hold. With --lm or --dtype: do the prompts work
    there, too?

    Args:
        results: A results.jsonl, or the run folder with it.
        lm: Try the prompts in this model, or in each of a list. Default: that of the rows.
        dtype: Try them in this dtype, or in each of a list. Default: that of the rows.
        as_text: Send text instead of ids, for models with another tokenizer.
        out: JSONL with each prompt; must not exist.
        load: Rare options for loading the LM.
    """
    rows = read_rows(results)
    if not rows:
        raise InputError(f"Expected RESULTS to hold result rows, but {results} is empty.")

    def load_named(name: str, dtype_name: str) -> FrozenLM:
        kind, bits = split_dtype_name(dtype_name)
        options = load.bos, load.trust_remote_code, load.device_map
        return load_lm(name, kind, default_device(), *options, bits)

    if not lm and not dtype:
        if out is not None or as_text:
            raise InputError(
                "Expected `--lm` or `--dtype` with `--out` or `--as_text`, but got none."
            )
        return _verify(rows, functools.cache(load_named))
    check_new_file(out)
    lms, dtypes = (value if isinstance(value, list) else [value] for value in (lm, dtype))
    if not as_text:
        for name, other in itertools.product(lms, {row.model for row in rows}):
            if name not in (None, other):
                _check_same_tokens(name, other)
    places: dict[tuple[str, str], list[Inversion]] = {}  # so that each model is loaded once
    for name, kind, row in itertools.product(lms, dtypes, rows):
        places.setdefault((name or row.model, kind or row.dtype), []).append(row)
    lcs = [row.lcs for row in rows], [row.round_trip_lcs for row in rows]
    models = ", ".join(sorted({row.model for row in rows}))
    kinds = ", ".join(sorted({f"{row.dtype}, recorded" for row in rows}))
    lines = [(models, kinds, *_cells([row.exact for row in rows], *lcs))]
    tried: list[Transfer] = []
    for place, members in places.items():
        model = load_named(*place)
        group = [try_row(model, row, as_text) for row in members]
        found = [t.lcs for t in group], [t.text_lcs for t in group]
        cells = _cells([t.was_exact for t in group], *found)
        lines.append((group[0].model, group[0].dtype, *cells))
        tried += group
    title = f"{len(rows)} prompts elsewhere, decoded one at a time"
    columns = ("model", "dtype", "exact: ids", "exact: text", "LCS: ids", "LCS: text")
    print_table(title, columns, lines, texts=["model", "dtype"])
    if out is not None:
        out.write_text("".join(map(to_line, tried)), encoding="utf-8")
        print(f"{len(tried)} prompts in {out}")
    return 0


def _cells(was_exact: Sequence[bool], *lcs: Sequence[float | None]) -> list[str]:
    """How many exact prompts are exact here, then the mean LCS of all: each as ids and as text."""
    counts, means = [], []
    for values in lcs:
        known = [value for value in values if value is not None]  # all of them, or none
        still = sum(value == 1 for value, was in zip(values, was_exact, strict=True) if was)
        counts.append(f"{still} of {sum(was_exact)}" if known else "-")
        means.append(f"{fmean(known):.3f}" if known else "-")
    return [*counts, *means]


def _verify(rows: Sequence[Inversion], load: Callable[[str, str], FrozenLM]) -> int:
    """Decode the prompts in the LM and dtype of their rows; returns the exit code."""
    screen = Console(stderr=True)
    shown = track(rows, "decoding", console=screen, disable=not screen.is_terminal)
    found = [verify_row(load(row.model, row.dtype), row) for row in shown]
    pasted = sum(row.round_trip_lcs == 1 for row in rows)
    lines = [
        ("exact from ids", sum(row.exact for row in rows), sum(v.exact for v in found)),
        ("exact from text", pasted, sum(v.text_exact for v in found)),
    ]
    title = f"{len(rows)} prompts decoded again, one at a time"
    print_table(title, ("", "recorded", "now"), lines, texts=[""])
    failures = [
        f"{row.target_id}: {problem}"
        for row, verified in zip(rows, found, strict=True)
        for problem in verified.problems
    ]
    for failure in failures:
        print(visible(failure))
    print(f"{len(rows)} rows, {len(failures)} recorded values do not hold")
    return 1 if failures else 0


def _check_same_tokens(name: str, other: str) -> None:
    """Raise `InputError` unless two models have the same token under every id."""
    mine, theirs = (
        {i: token for token, i in load_tokenizer(n).get_vocab().items()} for n in (name, other)
    )
    differing = sorted(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    if differing:
        first = differing[0]
        raise InputError(
            f"Expected `--lm` to have the tokenizer of {other}, but in {name} {len(differing)} ids "
            f"mean something else (id {first} is {mine.get(first)!r}, not {theirs.get(first)!r}). "
            "Use `--as_text true` to send the prompts as text."
        )
