"""What a run will cost, from one step on a stand-in."""

import pytest
from helpers.methods import METHODS, make_inverter

from dlmi.compare.cost import count_targets, most_token_passes
from dlmi.targets.sources import Sharing

RELAXATIONS = ["dlmi", "dlmi_shared_free_run", "gbda_annealed_final_samples", "reinforce", "soda"]
RELAXATIONS += ["pez", "adc"]


@pytest.mark.parametrize("name", RELAXATIONS)
def test_a_relaxation_costs_what_was_planned(name, data, fit):
    """Up to what a free run after the last right token saves."""
    module = make_inverter(name, steps=9, eval_every=9, prompt_bos=True)
    targets = data(k=(9,), length=6)
    planned = most_token_passes(module, targets)
    rows = fit(module, targets).values()
    assert {row.steps for row in rows} == {9}
    for row in rows:
        spent = row.forward_tokens + row.backward_tokens
        assert 0.8 * planned < spent <= planned


@pytest.mark.parametrize("name", ["gcg", "swap_search", "dlmi_refined"])
def test_a_search_is_unknown_but_for_its_token_budget(name, data):
    assert most_token_passes(make_inverter(name), data()) is None
    assert most_token_passes(make_inverter(name, token_budget=700), data()) == 700


def test_what_the_lm_has_to_encode_is_unknown(data, tmp_path):
    module = make_inverter("dlmi")
    assert METHODS["dlmi"].num_samples == 2
    # 12 steps of 2 samples, there and back, and 4 decodes: (5 + 3) tokens read, 3 more at most.
    assert most_token_passes(module, data()) == 12 * 2 * 2 * (5 + 3) + 4 * (5 + 2 * 3)
    for options in ({"texts": ["w1"]}, {"template": "w1 {slot}"}, {"share": Sharing()}):
        assert most_token_passes(module, data(**options)) is None
    assert most_token_passes(module, data(file=tmp_path / "x.jsonl")) is None


def test_targets_are_counted_where_that_needs_no_file(data, tmp_path):
    assert count_targets(data(k=(1, 2, 3), per_k=4)) == 12
    assert count_targets(data(texts=["w1", "w2"])) == 2
    assert count_targets(data(share=Sharing())) == 1
    assert count_targets(data(file=tmp_path / "x.jsonl")) is None
