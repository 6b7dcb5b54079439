"""Targets from files and from literal texts, and files of targets."""

import codecs
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlmi.errors import InputError
from dlmi.jsonl import parse_object, read_lines
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.context import NO_CONTEXT
from dlmi.targets.target import Target
from dlmi.targets.template import Template, find_template


def texts_to_targets(
    lm: FrozenLM, texts: Sequence[str | Mapping[str, Any]], template: Template | None = None
) -> list[Target]:
    """One target per text, tokenised without special tokens, after a template if there is one.

    A mapping is what a line of JSONL would be.
    """
    targets = []
    for index, text in enumerate(texts):
        name, where = f"text_{index}", f"`data.targets.texts[{index}]`"
        if isinstance(text, str):
            targets.append(_from_text(lm, text, name, where, template))
        else:
            targets.append(_from_json_line(lm, json.dumps(text).encode(), name, where, template))
    return targets


def read_targets(
    lm: FrozenLM, path: Path, template: Template | None = None, setting: str = "data.targets.path"
) -> list[Target]:
    """Targets of a file: JSONL with `ids` or `text` in each line, or plain text, one a line.

    In a line of JSONL `template` and `chat` go before those of the run; further names are the
    fields that a template asks for. Errors call the file by the `setting` that it was given as.
    """
    is_jsonl = path.suffix in (".jsonl", ".json")
    targets = []
    try:
        for number, line in read_lines(path):
            where = f"`{setting}` {path}, line {number}"
            # Editors on Windows open a file with a mark and end its lines with a return.
            line = line.removeprefix(codecs.BOM_UTF8).removesuffix(b"\r")
            read = _from_json_line if is_jsonl else _from_text_line
            targets.append(read(lm, line, f"line_{number}", where, template))
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


def _from_json_line(
    lm: FrozenLM, line: bytes, default_id: str, where: str, template: Template | None
) -> Target:
    def fail(expected: str, got: object) -> InputError:
        return InputError(f"Expected {where} to {expected}, but got {str(got)[:80]!r}.")

    try:
        row = {"id": default_id, **parse_object(line)}
        if not {"ids", "text", "examples"} & row.keys():
            raise InputError("it has neither")
    except InputError as error:
        expected = "to be a JSON object with `ids` or `text`"
        raise InputError(f"Expected {where} {expected}, but {error}.") from error
    template = _own_template(row, where, template)
    ids = row.get("ids", [])
    if "ids" in row and not (ids and isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise fail("have a non-empty list of token ids as `ids`", ids)
    try:
        # Without a text it is that of the ids, and the other way round, once both are known good.
        target = Target.from_json({"text": "", **row, "ids": ids})
    except InputError as error:
        raise InputError(f"Expected {where} to be a target, but {error}.") from error
    if not target.id:
        raise fail("have a name as `id`", target.id)
    if "examples" in row:
        if template is not None or not all(example.ids for example in target.all_examples):
            raise fail("have token ids in all `examples`, and no template", row)
    elif "ids" not in row:
        made = _from_text(lm, target.text, target.id, where, template, row)
        return dataclasses.replace(made, k=target.k, group=target.group)
    for example in target.all_examples:
        context = example.context
        lm.check_ids([*example.ids, *context.start_ids, *context.given_ids], where)
    if template is not None:
        context = template.fill(lm, row, where).context
        target = target.with_contexts(lambda _: context)
    if "text" in row or "examples" in row:
        return target
    [example] = target.examples
    return dataclasses.replace(
        target, examples=(dataclasses.replace(example, text=lm.decode(ids)),)
    )


def _own_template(row: Mapping[str, Any], where: str, common: Template | None) -> Template | None:
    """What a line asks for, else what stands around all prompts."""
    if not {"template", "chat"} & row.keys():
        return common
    text = row.get("template", common and common.text)
    chat = row.get("chat", common is not None and common.chat)
    if not isinstance(text, str | list | None) or not isinstance(chat, bool):
        got = f"but got {text!r} and {chat!r}"
        raise InputError(
            f"Expected {where} to have a text or messages as `template`, and true or false as "
            f"`chat`, {got[:200]}."
        )
    return find_template(text, chat, f"`template` in {where}")


def _from_text_line(
    lm: FrozenLM, line: bytes, target_id: str, where: str, template: Template | None
) -> Target:
    try:
        return _from_text(lm, line.decode("utf-8"), target_id, where, template)
    except UnicodeDecodeError as error:
        raise InputError(f"Expected {where} to be UTF-8, but it is not ({error}).") from error


def _from_text(
    lm: FrozenLM,
    text: str,
    target_id: str,
    where: str,
    template: Template | None,
    fields: Mapping[str, Any] | None = None,
) -> Target:
    filled = None if template is None else template.fill(lm, fields or {}, where)
    ids: Sequence[int] = ()
    if text.strip():
        ids = lm.encode(text) if filled is None else filled.continuation_ids(lm, text, where)
    if not ids:
        raise InputError(
            f"Expected {where} to be a text of at least one token, but got {text!r}. Leave it out."
        )
    lm.check_ids(ids, where)
    context = NO_CONTEXT if filled is None else filled.context
    return Target.single(target_id, ids, text, context)
