"""Templates: texts with slots for learned tokens and fields that each target fills in.

`{slot}` is where learned tokens go, `{slot:5}` is such a place for exactly 5 of them, `{name}` is a
field of the target's line in the targets file; `{{` and `}}` are braces. All slots together hold
`model.prompt_length` tokens: those without a length share what the others leave.

A tokenizer reads a text as a whole, so a piece of a template is tokenised next to what it will
stand beside, and what cannot keep its tokens there is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dlmi.errors import InputError
from dlmi.frames import Frame, Reasoning
from dlmi.lm import FrozenLM

_PART = re.compile(r"\{\{|\}\}|\{(?P<name>\w+)(?::(?P<length>\d+))?\}|(?P<stray>[{}])")
_SLOT = "slot"
_MARK = "\ue000\ue001"  # private to Unicode's users: stands for a slot while a chat is rendered
# What may stand before a piece: it is read as it would be after a learned token.
_NEIGHBOURS = (" x", "x", ".")


@dataclass(frozen=True)
class FilledTemplate:
    """A template with its fields filled in.

    Attributes:
        frame: Its tokens.
        tail: The text after the last slot, or the trigger that comes after everything.
        setting: What the tail was made from, as errors call it.
    """

    frame: Frame
    tail: str
    setting: str = "data.template"

    def with_reasoning(self, lm: FrozenLM, max_tokens: int, trigger: str) -> "FilledTemplate":
        """The same where the LM first reasons itself, and the trigger is put behind that."""
        reasoning = Reasoning(max_tokens, trigger, tuple(lm.encode(trigger)))
        return FilledTemplate(replace(self.frame, reasoning=reasoning), trigger, "data.trigger")

    def continuation_ids(self, lm: FrozenLM, text: str, where: str) -> tuple[int, ...]:
        """Ids of a text that follows the template, as the tokenizer reads them there."""
        if not self.tail:
            return tuple(lm.encode(text))
        reasoning = self.frame.reasoning
        tail_ids = self.frame.pieces[-1] if reasoning is None else reasoning.trigger_ids
        before, after = _after_neighbour(lm, self.tail, tail_ids), text
        together = lm.encode(before + after)
        start = len(lm.encode(before))
        if together[:start] != lm.encode(before):
            raise InputError(
                f"Expected the end of `{self.setting}` and {where} to keep their tokens side by "
                f"side, but {self.tail[-12:]!r} and {text[:12]!r} are read as other tokens "
                "together. Move a space or a new line from the end of the former to the start "
                "of the target, or give the target as `ids`."
            )
        return tuple(together[start:])


class Template:
    """A text with slots.

    Args:
        text: The template.
        chat: Whether it is the user's message of a chat, which the tokenizer's own chat template
            is put around.
        slots: Whether it has slots; else only fields.
    """

    def __init__(self, text: str, chat: bool = False, slots: bool = True) -> None:
        self.text = text
        self.chat = chat
        self._parts = list(_parse(text))
        lengths = [value for kind, value in self._parts if kind == _SLOT]
        if slots and not lengths:
            raise InputError(
                "Expected `data.template` to have at least one `{slot}` for the learned tokens, "
                f"but got {text!r}."
            )
        if lengths and not slots:
            raise InputError(f"Expected `data.answer` to have no `{{slot}}`, but got {text!r}.")
        self.slot_lengths = tuple(int(length) for length in lengths)

    @property
    def fields(self) -> list[str]:
        """Names that each target must have."""
        return [value for kind, value in self._parts if kind == "field"]

    def text_of(self, values: Mapping[str, Any], where: str) -> str:
        """The text with its fields filled in, and a mark for each slot."""
        return "".join(
            _MARK if kind == _SLOT else part if kind == "text" else _value(part, values, where)
            for kind, part in self._parts
        )

    def fill(self, lm: FrozenLM, values: Mapping[str, Any], where: str) -> FilledTemplate:
        """The template of one target.

        Args:
            lm: Whose tokens it is made of.
            values: The target's fields.
            where: How errors call the target.
        """
        text = self.text_of(values, where)
        if self.chat:
            text = _as_chat(lm, text)
        texts = text.split(_MARK)
        if len(texts) != len(self.slot_lengths) + 1:
            raise InputError(
                f"Expected the chat template of {lm.name} to keep each slot of `data.template` "
                f"once, but {len(self.slot_lengths)} became {len(texts) - 1}."
            )
        pieces = []
        for number, piece in enumerate(texts):
            ids = lm.encode(piece) if number == 0 else _ids_after_token(lm, piece)
            if number + 1 < len(texts):
                _check_before_slot(lm, piece)
            pieces.append(tuple(ids))
        frame = Frame(tuple(pieces), self.slot_lengths, template=self.text, chat=self.chat)
        return FilledTemplate(frame, texts[-1])


def find_template(text: str | None, chat: bool) -> Template | None:
    """The template that is asked for; a chat without a text is a message of the prompt alone."""
    if text is None:
        return Template("{slot}", chat) if chat else None
    return Template(text, chat)


def _parse(text: str) -> Iterator[tuple[str, str]]:
    """Kind and value of each part: `text`, `field` with its name, `slot` with its length."""
    start = 0
    for match in _PART.finditer(text):
        yield "text", text[start : match.start()]
        start = match.end()
        name, length = match["name"], match["length"]
        if match["stray"] or (length is not None and (name != _SLOT or int(length) == 0)):
            raise InputError(
                "Expected `data.template` to hold `{slot}`, `{slot:5}` and `{field}`, with `{{` "
                f"and `}}}}` for braces, but got {match[0]!r} at character {match.start() + 1}."
            )
        if name is None:
            yield "text", match[0][0]
        else:
            yield (_SLOT, length or "0") if name == _SLOT else ("field", name)
    yield "text", text[start:]


def _value(name: str, values: Mapping[str, Any], where: str) -> str:
    value = values.get(name)
    if not isinstance(value, str | int | float):
        got = "it is missing" if name not in values else f"got {str(value)[:40]!r}"
        raise InputError(
            f"Expected {where} to have a text as `{name}`, which `data.template` asks for, but "
            f"{got}. Only lines of a JSONL `data.targets_file` have fields."
        )
    return str(value)


def _as_chat(lm: FrozenLM, message: str) -> str:
    if getattr(lm.tokenizer, "chat_template", None) is None:
        raise InputError(
            f"Expected `data.chat: true` with an LM whose tokenizer has a chat template, but that "
            f"of {lm.name} has none. Write the marks of its turns into `data.template` instead."
        )
    turns = [{"role": "user", "content": message}]
    text: str = lm.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return text


def _ids_after_token(lm: FrozenLM, piece: str) -> list[int]:
    """Ids of a piece that stands after a learned token."""
    if not piece:
        return []
    for neighbour in _NEIGHBOURS:
        together, alone = lm.encode(neighbour + piece), lm.encode(neighbour)
        if together[: len(alone)] == alone:
            return together[len(alone) :]
    raise InputError(
        f"Expected what follows a slot in `data.template` to keep its tokens there, but "
        f"{piece[:20]!r} is read together with whatever stands before it. Start it with a space "
        "or a new line."
    )


def _after_neighbour(lm: FrozenLM, piece: str, ids: tuple[int, ...]) -> str:
    """The piece after the first neighbour that leaves its tokens alone."""
    for neighbour in _NEIGHBOURS:
        if lm.encode(neighbour + piece) == [*lm.encode(neighbour), *ids]:
            return neighbour + piece
    return piece


def _check_before_slot(lm: FrozenLM, piece: str) -> None:
    """Refuse a space before a slot that the tokenizer would give to the slot's first token."""
    if not piece[-1:].isspace():
        return
    alone = lm.encode(piece)
    if lm.encode(piece + "x")[: len(alone)] != alone:
        raise InputError(
            f"Expected `data.template` to have no {piece[-1]!r} before `{{slot}}`, but got "
            f"{piece[-12:]!r}: in the final text it belongs to the token after it. Leave it out: "
            "the learned tokens bring their own spaces."
        )
