"""Templates: texts or chats with blanks for the prompt and fields that each target fills in.

`{slot}` is a blank for tokens of the prompt, `{slot:5}` is one for exactly 5 of them, `{name}` is a
field of the target's line in the targets file; `{{` and `}}` are braces. All blanks together hold
`model.prompt_length` tokens: those without a length share what the others leave.

A tokenizer reads a text as a whole, so a piece of a template is tokenised next to what it will
stand beside, and what cannot keep its tokens there is refused. A space before a blank would go to
the token after it, so it is left out: the tokens of the prompt bring their own spaces.
"""

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import msgspec

from dlmi.errors import InputError, first_line
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.context import Context, Reasoning

Messages = list[dict[str, str]]  # of a chat, each with a role and a content

_BLANK = "slot"
_MARK = "\ue000\ue001"  # private use characters: stand for a blank while a chat is rendered
# What may stand before a piece: it is tokenised as it would be after a token of the prompt.
_NEIGHBOURS = (" x", "x", ".")


@dataclass(frozen=True)
class _Message:
    role: str
    content: str


@dataclass(frozen=True)
class FilledTemplate:
    """A template with its fields filled in."""

    context: Context  # its tokens
    tail: str  # the text after the last blank, or the trigger that comes after everything
    neighbour: str  # what may stand before that and leaves its tokens alone
    setting: str  # what the tail was made from, as errors call it

    def with_reasoning(self, lm: FrozenLM, max_tokens: int, trigger: str) -> "FilledTemplate":
        """The same where the LM first writes reasoning, and the trigger is appended to that."""
        reasoning = Reasoning(max_tokens, trigger, tuple(lm.encode(trigger)))
        context = replace(self.context, reasoning=reasoning)
        return FilledTemplate(context, trigger, "", "`data.targets.trigger`")

    def continuation_ids(self, lm: FrozenLM, text: str, where: str) -> tuple[int, ...]:
        """Ids of a text that follows the template, as the tokenizer reads them there."""
        if not self.tail:
            return tuple(lm.encode(text))
        ids = _ids_after(lm, self.neighbour + self.tail, text)
        if ids is None:
            raise InputError(
                f"Expected the end of {self.setting} and {where} to keep their tokens side by "
                f"side, but {self.tail[-12:]!r} and {text[:12]!r} are read as other tokens "
                "together. Move a space or a new line from the end of the former to the start "
                "of the target, or give the target as `ids`."
            )
        return tuple(ids)


class Template:
    """A text, or the messages of a chat, with blanks.

    Args:
        text: The template: a text, or messages with a role and a content, also as JSON.
        chat: Whether a text is the user's message of a chat. Around messages stands what the
            tokenizer's own chat template writes, up to where the assistant begins or, where the
            last message is the assistant's, up to its end.
        blanks: Whether it has blanks; else only fields.
        setting: What it was given as, as errors call it.

    Attributes:
        text: As it was given, messages as JSON.
        fields: Names that each target must have.
        blank_lengths: Tokens of each blank, 0 for those without a length.
    """

    def __init__(
        self,
        text: str | Messages,
        chat: bool = False,
        blanks: bool = True,
        setting: str = "`data.template`",
    ) -> None:
        messages = _read_messages(text, setting)
        self.text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        self.chat = chat or messages is not None
        self._setting = setting
        messages = messages or [_Message("user", self.text)]
        self._turns = [(m.role, list(_parse(m.content, setting))) for m in messages]
        parts = [part for _, content in self._turns for part in content]
        self.fields = [value for kind, value in parts if kind == "field"]
        self.blank_lengths = tuple(int(value) for kind, value in parts if kind == _BLANK)
        if blanks and not self.blank_lengths:
            raise InputError(
                f"Expected {setting} to have at least one `{{slot}}` for the tokens of the "
                f"prompt, but got {self.text!r}."
            )
        if self.blank_lengths and not blanks:
            raise InputError(f"Expected {setting} to have no `{{slot}}`, but got {self.text!r}.")

    def text_of(self, values: Mapping[str, Any], where: str) -> str:
        """The text with its fields filled in, and a mark for each blank."""
        return self._filled(self._turns[0][1], values, where)

    def fill(self, lm: FrozenLM, values: Mapping[str, Any], where: str) -> FilledTemplate:
        """The template with the fields of one target; `where` is how errors call that."""
        *before, tail = self._texts(lm, values, where)
        first, *others = [self._before_blank(lm, piece) for piece in before]
        pieces, neighbour = [lm.encode(first)], ""
        for piece in (*others, tail):
            neighbour, ids = self._after_token(lm, piece)
            pieces.append(ids)
        ids_of = tuple(map(tuple, pieces))
        context = Context(ids_of, self.blank_lengths, template=self.text, chat=self.chat)
        return FilledTemplate(context, tail, neighbour, self._setting)

    def ids(
        self, lm: FrozenLM, values: Mapping[str, Any], prompt: str | Sequence[int], where: str
    ) -> list[int]:
        """The template with a prompt in its blanks, as the LM reads it.

        A prompt of ids goes in as those ids. A prompt of text, which needs a template of one blank,
        is written into the text, and the whole is tokenised, as for someone who pastes it.
        """
        if not isinstance(prompt, str):
            return list(self.fill(lm, values, where).context.text_ids(prompt))
        if len(self.blank_lengths) != 1:
            raise InputError(
                f"Expected {self._setting} to have one `{{slot}}` for a prompt of text, but got "
                f"{len(self.blank_lengths)}. Give the prompt as ids."
            )
        return lm.encode(prompt.join(self._texts(lm, values, where)))

    def _texts(self, lm: FrozenLM, values: Mapping[str, Any], where: str) -> list[str]:
        """The texts before, between and after the blanks."""
        text = self._as_chat(lm, values, where) if self.chat else self.text_of(values, where)
        texts = text.split(_MARK)
        if len(texts) != len(self.blank_lengths) + 1:
            raise InputError(
                f"Expected the chat template of {lm.name} to keep each `{{slot}}` of "
                f"{self._setting} once, but {len(self.blank_lengths)} became {len(texts) - 1}."
            )
        return texts

    def _filled(
        self, parts: Sequence[tuple[str, str]], values: Mapping[str, Any], where: str
    ) -> str:
        texts = []
        for kind, part in parts:
            filled = self._value(part, values, where) if kind == "field" else part
            texts.append(_MARK if kind == _BLANK else filled)
        return "".join(texts)

    def _value(self, name: str, values: Mapping[str, Any], where: str) -> str:
        value = values.get(name)
        if not isinstance(value, str | int | float):
            got = "it is missing" if name not in values else f"got {str(value)[:40]!r}"
            raise InputError(
                f"Expected {where} to have a text as `{name}`, which {self._setting} asks for, "
                f"but {got}. Only lines of a JSONL file of targets have fields."
            )
        return str(value)

    def _as_chat(self, lm: FrozenLM, values: Mapping[str, Any], where: str) -> str:
        if getattr(lm.tokenizer, "chat_template", None) is None:
            raise InputError(
                "Expected an LM whose tokenizer has a chat template with `chat`, but that of "
                f"{lm.name} has none. Write the marks of its turns into {self._setting} instead."
            )
        messages = [
            {"role": role, "content": self._filled(content, values, where)}
            for role, content in self._turns
        ]
        is_begun = messages[-1]["role"] == "assistant"
        try:
            text: str = lm.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not is_begun,
                continue_final_message=is_begun,
            )
        except (jinja2.TemplateError, ValueError) as error:
            raise InputError(
                f"Expected {self._setting} to hold messages that the chat template of {lm.name} "
                f"can write, but it says: {first_line(error)}."
            ) from error
        return text

    def _after_token(self, lm: FrozenLM, piece: str) -> tuple[str, list[int]]:
        """A neighbour that stands for a token of the prompt, and the ids of a piece after it."""
        for neighbour in _NEIGHBOURS:
            if (ids := _ids_after(lm, neighbour, piece)) is not None:
                return neighbour, ids
        raise InputError(
            f"Expected what follows a slot in {self._setting} to keep its tokens there, but "
            f"{piece[:20]!r} is read together with whatever stands before it. Start it with a "
            "space or a new line."
        )

    def _before_blank(self, lm: FrozenLM, piece: str) -> str:
        """A piece without the spaces that the tokenizer would give to the prompt's token."""
        for text in (piece, piece.rstrip(" ")):
            if not text[-1:].isspace() or _ids_after(lm, text, "x") is not None:
                return text
        raise InputError(
            f"Expected {self._setting} to have no {piece[-1]!r} before `{{slot}}`, but got "
            f"{piece[-12:]!r}: in the final text it belongs to the token after it. Leave it out."
        )


def find_template(
    text: str | Messages | None, chat: bool, setting: str = "`data.template`"
) -> Template | None:
    """The template that is asked for; a chat without a text is a message of the prompt alone."""
    if text is None:
        return Template("{slot}", chat, setting=setting) if chat else None
    return Template(text, chat, setting=setting)


def _read_messages(text: str | Messages, setting: str) -> list[_Message] | None:
    """The messages of a template that has some; None for a text."""
    try:
        if not isinstance(text, str):
            return msgspec.convert(text or None, list[_Message])
        # No text begins like this: as a brace of its own it would have to be doubled.
        is_json = re.match(r'\s*\[\s*\{\s*"', text)
        return msgspec.json.decode(text, type=list[_Message]) if is_json else None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"Expected {setting} to be a text, or a list of messages that each have a `role` and "
            f"a `content`, but got {str(text)[:200]!r} ({error})."
        ) from error


def _parse(text: str, setting: str) -> Iterator[tuple[str, str]]:
    """Kind and value of each part: `text`, `field` with its name, `slot` with a length."""
    try:
        for literal, name, length, conversion in string.Formatter().parse(text):
            yield "text", literal
            if name is None:
                continue
            is_length = not length or (name == _BLANK and length.isdecimal() and int(length) > 0)
            if conversion or not is_length or not re.fullmatch(r"\w+", name):
                raise ValueError(f"{name!r} is none of these")
            yield (_BLANK, length or "0") if name == _BLANK else ("field", name)
    except ValueError as error:
        raise InputError(
            f"Expected {setting} to hold `{{slot}}`, `{{slot:5}}` and `{{field}}`, with `{{{{` "
            f"and `}}}}` for braces, but got {text!r} ({error})."
        ) from error


def _ids_after(lm: FrozenLM, before: str, text: str) -> list[int] | None:
    """Ids of a text after another; None where they do not keep their tokens side by side."""
    before_ids, together = lm.encode(before), lm.encode(before + text)
    is_kept = together[: len(before_ids)] == before_ids
    return together[len(before_ids) :] if is_kept else None
