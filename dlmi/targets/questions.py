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
TRIGGER = "\\n####"  # appended to reasoning; a backslash and n, as options are written


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
