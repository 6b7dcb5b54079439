"""Questions with answers: from files, from the package, or from the hub.

The format is that of GSM8k: a JSON object a line, with a `question` and an `answer` that is a
rationale and, in its last line, `#### ` with the final answer. An `answer` without the mark is the
final answer itself. In an LM's output without the mark, the last number is the answer, or the whole
text where the answer is not a number.
"""

import importlib.resources
import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from dlmi.errors import InputError, first_line
from dlmi.jsonl import build, read_objects

Split = Literal["train", "test"]
PACKAGED_QUESTIONS = "sums"
HUB_MARK = "hub:"
QUESTION_TEMPLATE = "{question}{slot}"
TRIGGER = "\\n####"  # appended to reasoning; a backslash and n, as options are written
MARK = "####"
# A minus after a digit is a subtraction; commas belong to a number where they group its digits.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+"
)
_AROUND = "$ *\"'`([{)]}"
_WHOLE_NUMBER = re.compile(r"([+-]?)\$*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)")


@dataclass(frozen=True)
class Question:
    """A question, and its answer as the file has it: with its rationale, if there is one."""

    question: str
    answer: str

    @property
    def final(self) -> str:
        """The final answer, normalised."""
        return normalise(self.answer.rsplit(MARK, 1)[-1])

    @property
    def fields(self) -> dict[str, str]:
        """The fields that a template may ask for."""
        return {"question": self.question, "answer": self.answer, "final": self.final}


def load_questions(
    source: str = PACKAGED_QUESTIONS, split: Split = "test", limit: int | None = None
) -> list[Question]:
    """Questions by the name of their source.

    Args:
        source: `sums` (the packaged ones), a JSONL file, or `hub:` and the name of a data set of
            the hub with the columns of GSM8k, such as `hub:openai/gsm8k`.
        split: The part of them to load; ignored for a file.
        limit: Take only the first ones.
    """
    if limit is not None and limit < 1:
        raise InputError(f"Expected `limit` to be at least 1, but got {limit}.")
    if source.startswith(HUB_MARK):
        return _read_hub(source.removeprefix(HUB_MARK), split)[:limit]
    if source != PACKAGED_QUESTIONS:
        return read_questions(Path(source).expanduser())[:limit]
    folder = importlib.resources.files("dlmi.targets") / "data"
    with importlib.resources.as_file(folder / f"{PACKAGED_QUESTIONS}_{split}.jsonl") as path:
        return read_questions(path)[:limit]


def read_questions(path: Path) -> list[Question]:
    """All questions of a JSONL file."""
    questions = []
    try:
        for number, question in read_objects(path, _checked):
            if isinstance(question, InputError):
                raise InputError(
                    f"Expected {path}, line {number}, to be a question with its answer, but "
                    f"{question}."
                )
            questions.append(question)
    except OSError as error:
        raise InputError(
            f"Expected the questions to be `{PACKAGED_QUESTIONS}`, a JSONL file or "
            f"`{HUB_MARK}NAME`, but got {path} ({error.strerror})."
        ) from error
    if not questions:
        raise InputError(f"Expected {path} to hold questions with answers, but it is empty.")
    return questions


def _checked(row: Mapping[str, Any]) -> Question:
    question = build(Question, dict(row))
    if not question.question.strip():
        raise InputError("`question` is empty")
    if not question.final:
        raise InputError("`answer` has no final answer")
    # A space at its end would become part of the first token after it.
    return replace(question, question=question.question.rstrip())


def _read_hub(name: str, split: Split) -> list[Question]:
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"Expected the package `datasets` to read {name!r} from the hub, but it is not "
            "installed. Install it with `pip install datasets`, or give a JSONL file: GSM8k's own "
            "are in https://github.com/openai/grade-school-math."
        )
    import datasets

    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(name, "main", split=split)
        return [_checked(row) for row in rows]
    except Exception as error:  # no network, no such name, other columns, ...
        raise InputError(
            f"Expected `{HUB_MARK}{name}` to be a data set of the hub with a `question` and an "
            f"`answer` in each row, but {first_line(error)}. A JSONL file needs no network."
        ) from error


def find_answer(text: str, is_number: bool = True) -> str | None:
    """The final answer of a text, a number or any text, normalised; None where there is none.

    >>> find_answer("3 + 4 = 7 apples, so $1,234.50 in all.")
    '1234.5'
    >>> find_answer("It is 5. #### 6 apples, not 7")
    '6'
    >>> find_answer("No idea.") is None
    True
    """
    has_mark = MARK in text
    rest = text.rsplit(MARK, 1)[1].strip().split("\n", 1)[0] if has_mark else text
    if not is_number:
        return normalise(rest) or None
    numbers = _NUMBER.findall(rest)
    # After the mark the answer comes first, before any remarks; in a text it comes last.
    return normalise(numbers[0 if has_mark else -1]) if numbers else None


def normalise(answer: str) -> str:
    """An answer in the form that is compared: bare numbers, texts in lower case.

    >>> [normalise(text) for text in ("$1,000.", "7.0", "-0.50", "+3", " Yes.")]
    ['1000', '7', '-0.5', '3', 'yes']
    """
    text = " ".join(answer.split()).casefold().lstrip(_AROUND).rstrip(f"{_AROUND}.,;:!?%")
    found = _WHOLE_NUMBER.fullmatch(text)
    if not found:
        return text
    number = Decimal(found[1] + found[2].replace(",", ""))
    return f"{number.normalize() + 0:f}"  # adding 0 drops the sign of a zero


def is_number(answer: str) -> bool:
    """Whether a normalised answer is a number.

    >>> is_number("-3.5"), is_number("yes")
    (True, False)
    """
    return _WHOLE_NUMBER.fullmatch(answer) is not None
