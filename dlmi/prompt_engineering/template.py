"""A text with a place for a question and a place for a prompt.

A prompt of ids goes in as those ids, and what stands before and after it is tokenised on its own; a
prompt of text is written into the text, and the whole is tokenised, as for someone who pastes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlmi.errors import InputError
from dlmi.lm import FrozenLM

QUESTION, SLOT = "{question}", "{slot}"
DEFAULT_TEMPLATE = "{question}{slot}"


@dataclass(frozen=True)
class QuestionTemplate:
    """A template of one question and one slot.

    Attributes:
        text: With `{question}` and `{slot}`, each once.
        chat: Make it the user's message of a chat, as the tokenizer's chat template writes it.
    """

    text: str = DEFAULT_TEMPLATE
    chat: bool = False

    def __post_init__(self) -> None:
        for name in (QUESTION, SLOT):
            if self.text.count(name) != 1:
                raise InputError(
                    f"Expected `template` to have {name} once, but got {self.text!r}, which has "
                    f"it {self.text.count(name)} times."
                )

    def ids(self, lm: FrozenLM, question: str, prompt: str | Sequence[int]) -> list[int]:
        """The question with the prompt in its slot, as the LM reads it."""
        # Split before the question is written in: it may hold any text.
        before, after = (part.replace(QUESTION, question) for part in self.text.split(SLOT))
        if self.chat:
            before, after = self._in_chat(lm, before, after)
        if isinstance(prompt, str):
            return lm.encode(before + prompt + after)
        return [*lm.encode(before), *prompt, *lm.encode(after)]

    def _in_chat(self, lm: FrozenLM, before: str, after: str) -> tuple[str, str]:
        if getattr(lm.tokenizer, "chat_template", None) is None:
            raise InputError(
                f"Expected an LM whose tokenizer has a chat template with `chat`, but that of "
                f"{lm.name} has none. Write the marks of its turns into `template` instead."
            )
        mark = "\ue000\ue001"  # private to Unicode's users: stands for the slot
        turns = [{"role": "user", "content": before + mark + after}]
        text: str = lm.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        parts = text.split(mark)
        if len(parts) != 2:
            raise InputError(
                f"Expected the chat template of {lm.name} to keep the slot once, but it has it "
                f"{len(parts) - 1} times. Write the marks of its turns into `template` instead."
            )
        return parts[0], parts[1]
