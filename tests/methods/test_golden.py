"""Recorded cases of every method give what they gave, but for differences that are listed."""

import pytest
from helpers.golden_changes import Runner, changed, is_same, read_cases, read_changes, reason_of

CASES = read_cases()
CHANGES = read_changes()


def quick_cases():
    """Of each row of the table the plain case, and one other in rotation."""
    variants = {}
    for name in CASES:
        row, variant = name.split("/")
        if variant != "plain":
            variants.setdefault(row, []).append(variant)
    numbered = enumerate(variants.items())
    chosen = {f"{row}/{others[i % len(others)]}" for i, (row, others) in numbered}
    return {name for name in CASES if name in chosen or name.endswith("/plain")}


QUICK = quick_cases()


@pytest.fixture(scope="module")
def run_case(tmp_path_factory):
    return Runner(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_recorded_case(name, run_case):
    case = CASES[name]
    rows = run_case(case)
    assert rows.keys() == case.rows.keys()
    for target_id, row in rows.items():
        expected = {**case.rows[target_id], **CHANGES.get((name, target_id), {})}
        assert changed(row, expected) == {}, target_id


def test_every_change_has_a_reason_and_is_one():
    for (name, target_id), now in CHANGES.items():
        assert reason_of(name, now)
        then = CASES[name].rows[target_id]
        assert now.keys() <= then.keys()
        assert not any(is_same(then[column], value) for column, value in now.items())
    costs = [name for name, now in CHANGES.items() if now.keys() == {"forward_tokens"}]
    assert len(costs) > len(CHANGES) / 2  # of most rows only the cost is another


def test_the_quick_cases_hold_every_variant():
    assert {name.split("/")[1] for name in QUICK} == {name.split("/")[1] for name in CASES}
    assert len(QUICK) < len(CASES) / 4
