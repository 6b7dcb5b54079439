"""Targets from files and from literal texts, and files of targets."""

import codecs
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from dlmi.errors import InputError
from dlmi.jsonl import build, parse_object, read_lines
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.target import Target
from dlmi.targets.template import FilledTemplate, Messages, Template, find_template


@dataclasses.dataclass(frozen=True)
class _Line:
    """What a line may contain besides the fields of a `Target` and of its template."""

    ids: list[int] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    template: str | Messages | UnsetType | None = UNSET
    chat: bool | UnsetType = UNSET


def texts_to_targets(
    lm: FrozenLM, texts: Sequence[str | Mapping[str, Any]], template: Template | None = None
) -> list[Target]:
    """One target per text, tokenised without special tokens; a mapping is as a line of JSONL."""
    targets = []
    for index, text in enumerate(texts):
        row = {"text": text} if isinstance(text, str) else dict(text)
        where = f"`data.targets.texts[{index}]`"
        targets.append(_make_target(lm, {"id": f"text_{index}", **row}, where, template))
    return targets


def read_targets(
    lm: FrozenLM, path: Path, template: Template | None = None, setting: str = "data.targets.path"
) -> list[Target]:
    """Targets of a file: JSONL with `ids` or `text` in each line, or plain text, one a line.

    `template` and `chat` in a line of JSONL override those of the run; other names are the fields
    that a template asks for. `setting` is the option that named the file, for messages.
    """
    is_jsonl = path.suffix in (".jsonl", ".json")
    targets = []
    try:
        for number, line in read_lines(path):
            where = f"`{setting}` {path}, line {number}"
            # Editors on Windows write a mark at the start of a file and a return at line ends.
            line = line.removeprefix(codecs.BOM_UTF8).removesuffix(b"\r")
            with _named(where):
                row = parse_object(line) if is_jsonl else {"text": line.decode("utf-8")}
            row = {"id": f"line_{number}", **row}
            targets.append(_make_target(lm, row, where, template))
    except UnicodeDecodeError as error:
        raise InputError(f"Expected {where} to be UTF-8, but it is not ({error}).") from error
    except OSError as error:
        raise InputError(
            f"Expected `{setting}` to be a readable file, but got {path} ({error})."
        ) from error
    if not targets:
        raise InputError(
            f"Expected `{setting}` to hold at least one target, but {path} is empty. "
            "Write some with `python -m dlmi targets --out FILE`."
        )
    return targets


def write_targets(path: Path, targets: Iterable[Target]) -> None:
    """One JSON line per target; `read_targets` gives them back bit for bit."""
    lines = (json.dumps(target.to_json(), ensure_ascii=False) + "\n" for target in targets)
    with path.open("x", encoding="utf-8") as file:
        file.writelines(lines)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Add to an error which line it is about, and what a line may contain."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"Expected {where} to be a JSON object with `ids` or `text` (a non-empty list of token "
            "ids, a text), and optionally a text or messages as `template` and true or false as "
            f"`chat`, but {error}."
        ) from error


def _make_target(lm: FrozenLM, row: dict[str, Any], where: str, common: Template | None) -> Target:
    """The target of a line; of `ids` and `text`, one is made from the other if it is missing."""
    with _named(where):
        line = build(_Line, row)
        if not {"ids", "text", "examples"} & row.keys():
            raise InputError("it has neither")
    template = _own_template(line, where, common)
    if "examples" in row and template is not None:
        raise InputError(f"Expected {where} to have no template, but it has `examples`.")
    filled = FilledTemplate() if template is None else template.fill(lm, row, where)
    if line.ids is not UNSET:
        lm.check_ids(line.ids, where)
        row = {"text": lm.decode(line.ids), **row}
    elif line.text is not UNSET:
        row = {**row, "ids": filled.continuation_ids(lm, line.text, where)}
    with _named(where):
        target = Target.from_json(row)
    for example in target.all_examples:
        context = example.context
        lm.check_ids([*example.ids, *context.start_ids, *context.given_ids], where)
    return target if template is None else target.with_contexts(lambda _: filled.context)


def _own_template(line: _Line, where: str, common: Template | None) -> Template | None:
    """The template that a line asks for, else the common one."""
    if line.template is UNSET and line.chat is UNSET:
        return common
    text: str | Messages | None = None if common is None else common.text
    text = text if line.template is UNSET else line.template
    chat = line.chat or (line.chat is UNSET and common is not None and common.chat)
    return find_template(text, chat, f"`template` in {where}")
