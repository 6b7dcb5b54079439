"""Templates: texts or chats with blanks for the prompt and fields that each target fills in.

`{slot}` is a blank for tokens of the prompt, `{slot:5}` is one for exactly 5 of them, `{name}` is a
field of the target's line in the targets file; `{{` and `}}` are braces. All blanks together hold
`model.prompt_length` tokens: those without a length share what the others leave.

A tokenizer reads a text as a whole, so each piece of a template is tokenised next to a stand-in for
its neighbour, and a piece whose tokens depend on the neighbour is refused. Spaces before a blank
are dropped: they would merge with the token after them, and the prompt's tokens bring their own.
"""

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import msgspec

from dlmi.errors import InputError, first_line
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.context import NO_CONTEXT, Context, Reasoning

Messages = list[dict[str, str]]  # of a chat, each with a role and a content

_BLANK = "slot"
_MARK = "\ue000\ue001"  # private use characters: stand for a blank while a chat is rendered
_NEIGHBOURS = (" x", "x", ".")  # stand for the prompt's last token when a piece is tokenised


@dataclass(frozen=True)
class _Message:
    role: str
    content: str


@dataclass(frozen=True)
class FilledTemplate:
    """A template with its fields filled in."""

    context: Context = NO_CONTEXT
    tail: str = ""  # the last text before the target: after the last blank, or the trigger
    neighbour: str = ""  # a text before the tail that leaves its tokens alone
    setting: str = "`data.template`"  # where the tail comes from, for messages

    def with_reasoning(self, lm: FrozenLM, max_tokens: int, trigger: str) -> "FilledTemplate":
        """The template followed by the LM's own reasoning and the trigger."""
        reasoning = Reasoning(max_tokens, trigger, tuple(lm.encode(trigger)))
        context = replace(self.context, reasoning=reasoning)
        return FilledTemplate(context, trigger, setting="`data.targets.trigger`")

    def continuation_ids(self, lm: FrozenLM, text: str, where: str) -> tuple[int, ...]:
        """Ids of a target's text as the tokenizer reads it after the template."""
        ids = _ids_after(lm, self.neighbour + self.tail, text) if self.tail else lm.encode(text)
        if ids is None:
            raise InputError(
                f"Expected the end of {self.setting} and {where} to keep their tokens side by "
                f"side, but {self.tail[-12:]!r} and {text[:12]!r} are read as other tokens "
                "together. Move a space or a new line from the end of the former to the start "
                "of the target, or give the target as `ids`."
            )
        if not ids or not text.strip():
            raise InputError(
                f"Expected {where} to be a text of at least one token, but got {text!r}."
            )
        return tuple(ids)


class Template:
    """A text, or the messages of a chat, with blanks.

    Args:
        text: The template: a text, or messages with a role and a content, also as JSON.
        chat: Whether a text is the user's message of a chat. Messages are rendered with the
            tokenizer's chat template, up to the start of the assistant's reply or, where the last
            message is the assistant's, up to its end.
        blanks: Whether it must have blanks; else it may only have fields.
        setting: Where it comes from, for messages.
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
        parsed = [_parse(message.content, setting) for message in messages]
        self._roles = [message.role for message in messages]
        self._formats = [format_string for format_string, _, _ in parsed]
        # Names that each target must have, and tokens of each blank, 0 for those without a length
        self.fields = [name for _, names, _ in parsed for name in names]
        self.blank_lengths = tuple(length for _, _, lengths in parsed for length in lengths)
        if blanks != bool(self.blank_lengths):
            wanted = (
                "at least one `{slot}` for the tokens of the prompt" if blanks else "no `{slot}`"
            )
            raise InputError(f"Expected {setting} to have {wanted}, but got {self.text!r}.")

    def text_of(self, values: Mapping[str, Any], where: str) -> str:
        """The text with its fields filled in, and a mark for each blank."""
        return self._filled(values, where)[0]

    def fill(self, lm: FrozenLM, values: Mapping[str, Any], where: str) -> FilledTemplate:
        """The template with the fields of one target, which messages call `where`."""
        *before, tail = self._texts(lm, values, where)
        first, *others = [self._before_blank(lm, piece) for piece in before]
        pieces, neighbour = [tuple(lm.encode(first))], ""
        for piece in (*others, tail):
            neighbour, ids = self._after_token(lm, piece)
            pieces.append(tuple(ids))
        context = Context(tuple(pieces), self.blank_lengths, template=self.text, chat=self.chat)
        return FilledTemplate(context, tail, neighbour, self._setting)

    def ids(
        self, lm: FrozenLM, values: Mapping[str, Any], prompt: str | Sequence[int], where: str
    ) -> list[int]:
        """Ids of the template with a prompt in its blanks.

        A prompt of ids keeps them. A prompt of text, for a template of one blank, is tokenised
        together with the text around it.
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

    def _filled(self, values: Mapping[str, Any], where: str) -> list[str]:
        """The texts of all messages."""
        for name in self.fields:
            if not isinstance(values.get(name), str | int | float):
                raise InputError(
                    f"Expected {where} to have a text as `{name}`, which {self._setting} asks for, "
                    f"but got {str(values.get(name))[:40]!r}. Only lines of JSONL have fields."
                )
        return [format_string.format_map(values) for format_string in self._formats]

    def _as_chat(self, lm: FrozenLM, values: Mapping[str, Any], where: str) -> str:
        if getattr(lm.tokenizer, "chat_template", None) is None:
            raise InputError(
                "Expected an LM whose tokenizer has a chat template with `chat`, but that of "
                f"{lm.name} has none. Write the marks of its turns into {self._setting} instead."
            )
        pairs = zip(self._roles, self._filled(values, where), strict=True)
        messages = [{"role": role, "content": content} for role, content in pairs]
        is_begun = self._roles[-1] == "assistant"
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
        """A stand-in for a token of the prompt, and the ids of a piece after it."""
        for neighbour in _NEIGHBOURS:
            if (ids := _ids_after(lm, neighbour, piece)) is not None:
                return neighbour, ids
        raise InputError(
            f"Expected the text after a slot in {self._setting} to keep its tokens there, but "
            f"{piece[:20]!r} merges with any token before it. Start it with a space or a new line."
        )

    def _before_blank(self, lm: FrozenLM, piece: str) -> str:
        """A piece without the spaces that would merge with the prompt's token."""
        for text in (piece, piece.rstrip(" ")):
            if not text[-1:].isspace() or _ids_after(lm, text, "x") is not None:
                return text
        raise InputError(
            f"Expected {self._setting} to have no {piece[-1]!r} before `{{slot}}`, but got "
            f"{piece[-12:]!r}: it would merge with the token after it. Leave it out."
        )


def find_template(
    text: str | Messages | None, chat: bool, setting: str = "`data.template`"
) -> Template | None:
    """The template of some settings; a chat without a text is a message of the prompt alone."""
    if text is None and not chat:
        return None
    return Template("{slot}" if text is None else text, chat, setting=setting)


def _read_messages(text: str | Messages, setting: str) -> list[_Message] | None:
    """The messages of a template that has some; None for a text."""
    try:
        if not isinstance(text, str):
            return msgspec.convert(text or None, list[_Message])
        # No text can begin like this: a brace of its own would have to be doubled.
        is_json = re.match(r'\s*\[\s*\{\s*"', text)
        return msgspec.json.decode(text, type=list[_Message]) if is_json else None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"Expected {setting} to be a text, or a list of messages that each have a `role` and "
            f"a `content`, but got {str(text)[:200]!r} ({error})."
        ) from error


def _parse(text: str, setting: str) -> tuple[str, list[str], list[int]]:
    """A format string of the fields, with marks for blanks; names of fields, lengths of blanks."""
    format_string, names, lengths = "", [], []
    try:
        for literal, name, length, conversion in string.Formatter().parse(text):
            format_string += literal.replace("{", "{{").replace("}", "}}")
            if name == _BLANK and not conversion and (not length or int(length) > 0):
                format_string += _MARK
                lengths.append(int(length or 0))
            elif name is not None:
                if length or conversion or not re.fullmatch(r"[^\W\d]\w*", name):
                    raise ValueError(f"{name!r} is not one of these")
                format_string += f"{{{name}}}"
                names.append(name)
    except ValueError as error:
        raise InputError(
            f"Expected {setting} to hold `{{slot}}`, `{{slot:5}}` and `{{field}}`, with `{{{{` "
            f"and `}}}}` for braces, but got {text!r} ({error})."
        ) from error
    return format_string, names, lengths


def _ids_after(lm: FrozenLM, before: str, text: str) -> list[int] | None:
    """Ids of a text after another; None where they do not keep their tokens side by side."""
    before_ids, together = lm.encode(before), lm.encode(before + text)
    is_kept = together[: len(before_ids)] == before_ids
    return together[len(before_ids) :] if is_kept else None
