"""Questions with answers: from files, from the package, or from the hub.

The format is that of GSM8k: a JSON object a line, with a `question` and an `answer` that is a
rationale and, in its last line, `#### ` with the final answer. An `answer` without the mark is the
final answer itself.
"""

import importlib.resources
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dlmi.errors import InputError, first_line
from dlmi.jsonl import build, read_objects
from dlmi.targets.answers import MARK, normalise

Split = Literal["train", "test"]
PACKAGED_QUESTIONS = "sums"
HUB_MARK = "hub:"
QUESTION_TEMPLATE = "{question}{slot}"
TRIGGER = "\\n####"  # what usually follows reasoning; a backslash and n, as options are written


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
        """What a template may ask for."""
        return {"question": self.question, "answer": self.answer, "final": self.final}

    @property
    def rationale(self) -> str | None:
        """What leads to it, where there is such a text."""
        return self.answer.rsplit(MARK, 1)[0].rstrip() if MARK in self.answer else None


def load_questions(
    source: str = PACKAGED_QUESTIONS, split: Split = "test", limit: int | None = None
) -> list[Question]:
    """Questions by the name of their source.

    Args:
        source: `sums` (the packaged ones), a JSONL file, or `hub:` and the name of a data set of
            the hub with the columns of GSM8k, such as `hub:openai/gsm8k`.
        split: Which part of them; a file has no parts.
        limit: Take only the first ones.

    Raises:
        InputError: If there are none.
    """
    if source == PACKAGED_QUESTIONS:
        folder = importlib.resources.files("dlmi.targets") / "data"
        with importlib.resources.as_file(folder / f"{PACKAGED_QUESTIONS}_{split}.jsonl") as path:
            questions = read_questions(path)
    elif source.startswith(HUB_MARK):
        questions = _read_hub(source.removeprefix(HUB_MARK), split)
    else:
        questions = read_questions(Path(source).expanduser())
    if limit is not None and limit < 1:
        raise InputError(f"Expected `limit` to be at least 1, but got {limit}.")
    return questions[:limit]


def read_questions(path: Path) -> list[Question]:
    """All questions of a JSONL file, in GSM8k's own format."""
    try:
        found = list(read_objects(path, _checked))
    except OSError as error:
        raise InputError(
            f"Expected the questions to be `{PACKAGED_QUESTIONS}`, a JSONL file or "
            f"`{HUB_MARK}NAME`, but got {path} ({error.strerror})."
        ) from error
    if not found:
        raise InputError(f"Expected {path} to hold questions with answers, but it is empty.")
    questions = []
    for number, question in found:
        if isinstance(question, InputError):
            raise InputError(
                f"Expected {path}, line {number}, to be a question with its answer, but {question}."
            )
        questions.append(question)
    return questions


def _checked(row: Mapping[str, Any]) -> Question:
    question = build(Question, dict(row))
    if not question.question.strip():
        raise InputError("`question` is empty")
    if not question.final:
        raise InputError("`answer` has no final answer")
    # A space at its end would go to the first token after it.
    return replace(question, question=question.question.rstrip())


def _read_hub(name: str, split: Split) -> list[Question]:
    """A data set of the hub; only ever called for a name that the user gave."""
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
    except Exception as error:  # no network, no such name, other columns: whatever it comes up with
        raise InputError(
            f"Expected `{HUB_MARK}{name}` to be a data set of the hub with a `question` and an "
            f"`answer` in each row, but {first_line(error)}. A JSONL file needs no network."
        ) from error
