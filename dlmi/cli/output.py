"""Checks of output files and folders, tables for the terminal, and texts of several commands."""

import os
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlmi.errors import InputError
from dlmi.text import visible

TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))


def check_new_file(out: Path | None, option: str = "--out") -> None:
    """Raise `InputError` if a file is given that exists or cannot be written."""
    if out is None:
        return
    try:
        out.open("x").close()
        out.unlink()
    except OSError as error:
        raise InputError(
            f"Expected `{option}` to be a new file in an existing folder, but got {out} "
            f"({error.strerror})."
        ) from error


def check_writable(folder: Path, option: str) -> None:
    """Raise `InputError` unless a folder can be written or created."""
    existing = next(path for path in (folder, *folder.resolve().parents) if os.path.lexists(path))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise InputError(
            f"Expected `{option}` to be a folder that can be written, but {folder} cannot "
            f"({existing}: {error.strerror})."
        ) from error


def print_table(
    title: str,
    columns: Collection[str],
    rows: Iterable[Sequence[object]],
    texts: Collection[str] = (),
) -> None:
    """Print a table, without markup; columns in `texts` are aligned to the left."""
    heading = Text(visible(title), "table.title")  # it would wrap in a narrow table
    table = Table(title=heading, title_justify="left", min_width=len(heading))
    for column in columns:
        table.add_column(column, justify="left" if column in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    Console().print(table)
