"""The final answer in a text, in the form in which answers are compared.

GSM8k writes a rationale, then `#### 42`. In a text without the mark the last number is the answer,
or the whole text where the answer is not a number.
"""

import re
from decimal import Decimal

MARK = "####"
# A minus after a digit is a subtraction; commas belong to a number where they group its digits.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+"
)
_AROUND = "$ *\"'`([{)]}"
_WHOLE_NUMBER = re.compile(r"([+-]?)\$*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)")


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
    return re.fullmatch(r"-?\d+(?:\.\d+)?", answer) is not None
