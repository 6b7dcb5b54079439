"""Targets of one group are tries at one task: when one is solved, the others leave."""

import dataclasses

import pytest

from dlmi import Inverter, TargetDataModule
from dlmi.methods import SwapSearch
from dlmi.targets.files import texts_to_targets


@pytest.fixture
def targets(tiny):
    """Three tries at a text, and one that is alone."""
    text, alone = texts_to_targets(tiny, ["w9 w9", "w9"])
    tries = [dataclasses.replace(text, id=f"try_{i}", group="text") for i in range(3)]
    return [*tries, alone]


@pytest.mark.parametrize("slots", [1, 2, 4], ids=["they wait", "some are in flight", "all are"])
def test_the_first_solved_ends_its_group_alone(tiny, fit, targets, slots):
    model = Inverter(SwapSearch(), prompt_length=4, steps=60, seed=1)
    rows = fit(model, TargetDataModule.of(tiny, targets, batch_size=slots))
    assert {row.stop_reason for row in rows.values()} == {"solved"}
    assert len(rows) == 2
    assert len(rows.keys() & {"try_0", "try_1", "try_2"}) == 1
    assert "text_1" in rows


def test_all_of_a_group_have_a_row_where_none_is_solved(tiny, fit, targets):
    hard = texts_to_targets(tiny, ["w1 w2 w9 w9 w9 w8"])[0]
    tries = [dataclasses.replace(hard, id=f"try_{i}", group="text") for i in range(3)]
    model = Inverter(SwapSearch(), prompt_length=4, steps=1)
    rows = fit(model, TargetDataModule.of(tiny, tries, batch_size=2))
    assert {row.stop_reason for row in rows.values()} == {"budget"}
    assert len(rows) == 3
