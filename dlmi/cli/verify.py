"""`python -m dlmi verify`: decode found prompts again, where they were found or elsewhere."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from jsonargparse import Namespace
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dlmi.cli.parser import CommandParser, check_new_file, default_device
from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.loading import load_lm, load_tokenizer
from dlmi.lm.placement import DType, split_dtype_name
from dlmi.rows import Inversion, read_rows
from dlmi.run.data import LoadOptions
from dlmi.scoring.verification import Transfer, try_row, verify_row
from dlmi.text import visible

_Load = Callable[[str, str], FrozenLM]


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m dlmi verify",
        usage="python -m dlmi verify RESULTS [options]",
        description=(
            "Load the LM and decode every prompt of a results.jsonl again, one at a time, from "
            "its ids and from its text. With --lm or --dtype: do the prompts work there, too?"
        ),
    )
    parser.add_argument("results", type=Path, help="A results.jsonl, or the run folder with it.")
    parser.add_argument(
        "--lm",
        type=str | list[str] | None,
        default=None,
        help="Try the prompts in this model, or in each of a list. Default: that of the rows.",
    )
    parser.add_argument(
        "--dtype",
        type=DType | list[DType] | None,
        default=None,
        help="Try them in this dtype, or in each of a list. Default: that of the rows.",
    )
    parser.add_argument(
        "--as_text",
        type=bool,
        default=False,
        help="Send text instead of ids, for models with another tokenizer.",
    )
    parser.add_argument(
        "--out", type=Path | None, default=None, help="JSONL with each prompt; must not exist."
    )
    parser.add_class_arguments(LoadOptions, "load", skip={"quantization"})
    return parser


def verify_command(arguments: list[str]) -> int:
    """Exit code 1 where a recorded value does not hold.

    With `--lm` or `--dtype` it asks instead how the prompts do elsewhere, which nothing promises.
    """
    config = make_parser().parse_args(arguments)
    rows = read_rows(config.results)
    if not rows:
        raise InputError(f"Expected RESULTS to hold result rows, but {config.results} is empty.")

    def load(name: str, dtype_name: str) -> FrozenLM:
        dtype, bits = split_dtype_name(dtype_name)
        options = config.load
        return load_lm(
            name,
            dtype,
            default_device(),
            options.bos,
            options.trust_remote_code,
            options.device_map,
            bits,
        )

    if config.lm or config.dtype:
        if config.out is not None:
            check_new_file(config.out)
        return _try_elsewhere(rows, config, load)
    if config.out is not None or config.as_text:
        raise InputError("Expected `--lm` or `--dtype` with `--out` or `--as_text`, but got none.")
    return _verify(rows, load)


def _verify(rows: Sequence[Inversion], load: _Load) -> int:
    """Decode where the prompts were found."""
    lms: dict[tuple[str, str], FrozenLM] = {}
    failures: list[str] = []
    exact_ids = exact_text = 0
    for row in track(
        rows, "decoding", console=Console(stderr=True), disable=not sys.stderr.isatty()
    ):
        key = row.model, row.dtype
        if key not in lms:
            lms[key] = load(*key)
        verified = verify_row(lms[key], row)
        failures += [f"{row.target_id}: {problem}" for problem in verified.problems]
        exact_ids += verified.exact
        exact_text += verified.text_exact
    table = Table(title=f"{len(rows)} prompts decoded again, one at a time", title_justify="left")
    for column in ("", "recorded", "now"):
        table.add_column(column, justify="right")
    table.add_row("exact from ids", str(sum(r.exact for r in rows)), str(exact_ids))
    table.add_row("exact from text", str(sum(r.round_trip_lcs == 1 for r in rows)), str(exact_text))
    Console().print(table)
    for failure in failures:
        print(visible(failure))
    print(f"{len(rows)} rows, {len(failures)} recorded values do not hold")
    return 1 if failures else 0


def _try_elsewhere(rows: Sequence[Inversion], config: Namespace, load: _Load) -> int:
    """Try all prompts in all models and dtypes, and print how they do."""
    if not config.as_text:
        for name, other in itertools.product(_as_list(config.lm), {row.model for row in rows}):
            if name not in (None, other):
                _check_same_tokens(name, other)
    tried: list[Transfer] = []
    for place, members in _places(rows, config.lm, config.dtype).items():
        lm = load(*place)
        tried += [try_row(lm, row, config.as_text) for row in members]
    Console().print(_table(rows, tried))
    if config.out is not None:
        lines = (json.dumps(dataclasses.asdict(t), ensure_ascii=False) + "\n" for t in tried)
        config.out.write_text("".join(lines), encoding="utf-8")
        print(f"{len(tried)} prompts in {config.out}")
    return 0


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


def _places(
    rows: Sequence[Inversion], lms: str | list[str] | None, dtypes: DType | list[DType] | None
) -> dict[tuple[str, DType], list[Inversion]]:
    """The rows by model and dtype where they are tried, so that each model is loaded once."""
    found: dict[tuple[str, DType], list[Inversion]] = {}
    for lm, dtype, row in itertools.product(_as_list(lms), _as_list(dtypes), rows):
        wanted = dtype or row.dtype
        if wanted not in get_args(DType):
            raise InputError(
                f"Expected row {row.target_id} to name a dtype, but got {wanted!r}. Give one with "
                "`--dtype`."
            )
        found.setdefault((lm or row.model, cast(DType, wanted)), []).append(row)
    return found


def _table(rows: Sequence[Inversion], tried: Sequence[Transfer]) -> Table:
    """What the rows say, and below it each model and dtype where their prompts were tried.

    Exact counts the rows that were exact and still are; LCS is the honest mean over all rows.
    """
    table = Table(title=f"{len(rows)} prompts elsewhere, decoded one at a time")
    for heading in ("model", "dtype"):
        table.add_column(heading, overflow="fold")
    for heading in ("exact: ids", "exact: text", "LCS: ids", "LCS: text"):
        table.add_column(heading, justify="right")
    exact = [row for row in rows if row.exact]
    table.add_row(
        *_folded({row.model for row in rows}, {f"{row.dtype}, recorded" for row in rows}),
        f"{len(exact)} of {len(exact)}",
        f"{sum(row.round_trip_lcs == 1 for row in exact)} of {len(exact)}",
        _mean([row.lcs for row in rows]),
        _mean([row.round_trip_lcs for row in rows]),
        end_section=True,
    )
    for (model, dtype), group in _by_place(tried):
        were_exact = [t for t in group if t.was_exact]
        from_ids = [t.lcs for t in group if t.lcs is not None]
        still = f"{sum(t.exact is True for t in were_exact)} of {len(were_exact)}"
        table.add_row(
            *_folded({model}, {dtype}),
            still if from_ids else "-",
            f"{sum(t.text_exact for t in were_exact)} of {len(were_exact)}",
            _mean(from_ids),
            _mean([t.text_lcs for t in group]),
        )
    return table


def _by_place(tried: Sequence[Transfer]) -> Iterator[tuple[tuple[str, str], list[Transfer]]]:
    for place, group in itertools.groupby(tried, key=lambda t: (t.model, t.dtype)):
        yield place, list(group)


def _as_list(value: Any) -> list[Any]:
    """One value, or several, or None for that of each row."""
    return value if isinstance(value, list) and value else [value or None]


def _folded(*cells: set[str]) -> list[Text]:
    return [Text(visible(", ".join(sorted(cell)))) for cell in cells]


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"
