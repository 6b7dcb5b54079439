"""Questions with answers: from files, from the package, or from the hub.

The format is that of GSM8k: a JSON object a line, with a `question` and an `answer` that is a
rationale and, in its last line, `#### ` with the final answer. An `answer` without the mark is the
final answer itself.
"""

import importlib.resources
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlmi.errors import InputError
from dlmi.json_lines import build, parse_object, read_lines
from dlmi.prompt_engineering.answers import MARK, normalise

Split = Literal["train", "test"]
PACKAGED_EXAMPLES = "sums"
HUB_MARK = "hub:"


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        question: The question.
        answer: Rationale and final answer, as the file has it.
    """

    question: str
    answer: str

    @property
    def final(self) -> str:
        """The final answer, normalised."""
        return normalise(self.answer.rsplit(MARK, 1)[-1])

    @property
    def rationale(self) -> str | None:
        """What leads to it, where there is such a text."""
        return self.answer.rsplit(MARK, 1)[0].rstrip() if MARK in self.answer else None


def load_examples(
    source: str = PACKAGED_EXAMPLES, split: Split = "test", limit: int | None = None
) -> list[Example]:
    """Examples by the name of their source.

    Args:
        source: `sums` (the packaged ones), a JSONL file, or `hub:` and the name of a data set of
            the hub with the columns of GSM8k, such as `hub:openai/gsm8k`.
        split: Which part of them; a file has no parts.
        limit: Take only the first ones.

    Raises:
        InputError: If there are none.
    """
    if source == PACKAGED_EXAMPLES:
        folder = importlib.resources.files("dlmi.prompt_engineering") / "data"
        with importlib.resources.as_file(folder / f"{PACKAGED_EXAMPLES}_{split}.jsonl") as path:
            examples = read_examples(path)
    elif source.startswith(HUB_MARK):
        examples = _read_hub(source.removeprefix(HUB_MARK), split)
    else:
        examples = read_examples(Path(source).expanduser())
    if limit is not None and limit < 1:
        raise InputError(f"Expected `limit` to be at least 1, but got {limit}.")
    return examples[:limit]


def read_examples(path: Path) -> list[Example]:
    """All examples of a JSONL file, in GSM8k's own format."""
    try:
        lines = list(read_lines(path))
    except OSError as error:
        raise InputError(
            f"Expected `examples` to be `{PACKAGED_EXAMPLES}`, a JSONL file or "
            f"`{HUB_MARK}NAME`, but got {path} ({error.strerror})."
        ) from error
    rows = []
    for number, line in lines:
        try:
            rows.append(_checked(parse_object(line)))
        except InputError as error:
            raise InputError(
                f"Expected {path}, line {number}, to be a question with its answer, but {error}."
            ) from error
    if not rows:
        raise InputError(f"Expected {path} to hold questions with answers, but it is empty.")
    return rows


def _checked(row: Mapping[str, Any]) -> Example:
    example = build(Example, dict(row))
    if not example.question.strip():
        raise InputError("`question` is empty")
    if not example.final:
        raise InputError("`answer` has no final answer")
    return example


def _read_hub(name: str, split: Split) -> list[Example]:
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
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"Expected `{HUB_MARK}{name}` to be a data set of the hub with a `question` and an "
            f"`answer` in each row, but {first}. A JSONL file needs no network."
        ) from error
