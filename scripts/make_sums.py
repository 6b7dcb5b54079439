"""The packaged examples: short word questions whose answer is one sum or one difference.

They are made here from nothing but the lists below, so that they carry no one else's rights (they
are under the package's own licence). No sum and no difference of a held-out question occurs in the
training part, in whatever words and order.

    python scripts/make_sums.py    # writes both parts into the package anew, the same
"""

import json
import random
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "dlmi" / "targets" / "data"
Example = dict[str, str]  # a question and its answer, in GSM8k's format

SIZES: dict[str, int] = {"train": 120, "test": 80}
_SEED = 20260217
_TRAIN_SHARE = 0.6  # of the pairs of numbers
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas")
_THINGS = ("apples", "books", "coins", "stamps", "marbles", "pencils", "cards", "shells")
_SUMS = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} on the table and {b} in the box. How many {things} are there in all?",
    "{name} finds {a} {things} in the morning and {b} in the evening. How many {things} is that?",
)
_DIFFERENCES = (
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "There are {a} {things} in a box. {name} takes {b} out. How many {things} remain in the box?",
    "{name} had {a} {things} and lost {b} of them. How many {things} does {name} have now?",
)


def make_sums(seed: int = _SEED) -> dict[str, list[Example]]:
    """Both parts, the same at every call."""
    draw = random.Random(seed)
    sums = [(a, b) for a in range(2, 10) for b in range(2, a + 1)]
    differences = [(a, b) for a in range(4, 11) for b in range(2, a - 1)]
    parts: dict[str, list[Example]] = {"train": [], "test": []}
    for is_sum, pairs in ((True, sums), (False, differences)):
        draw.shuffle(pairs)
        cut = round(_TRAIN_SHARE * len(pairs))
        own_pairs: dict[str, list[tuple[int, int]]] = {"train": pairs[:cut], "test": pairs[cut:]}
        for split, own in own_pairs.items():
            made: dict[str, Example] = {}  # by question: none twice
            while len(made) < SIZES[split] // 2:
                example = _example(draw, is_sum, *draw.choice(own))
                made[example["question"]] = example
            parts[split] += made.values()
    for examples in parts.values():
        draw.shuffle(examples)
    return parts


def _example(draw: random.Random, is_sum: bool, a: int, b: int) -> Example:
    pattern = draw.choice(_SUMS if is_sum else _DIFFERENCES)
    if is_sum and draw.random() < 0.5:
        a, b = b, a
    question = pattern.format(name=draw.choice(_NAMES), things=draw.choice(_THINGS), a=a, b=b)
    result = a + b if is_sum else a - b
    answer = f"{a} {'+' if is_sum else '-'} {b} = {result}\n#### {result}"
    return {"question": question, "answer": answer}


def as_json_lines(examples: list[Example]) -> str:
    """Examples as a file has them."""
    return "".join(json.dumps(example) + "\n" for example in examples)


if __name__ == "__main__":
    for part, made in make_sums().items():
        path = DATA / f"sums_{part}.jsonl"
        path.write_text(as_json_lines(made), encoding="utf-8")
        print(f"{len(made)} examples in {path}")
