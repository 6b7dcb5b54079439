import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmi.metrics import lcs_members, lcs_ratio, overlap_ratio, perplexity, target_hit_ratio

sequences = st.lists(st.integers(0, 4), max_size=7)


def brute_force_lcs(first, second):
    if not first or not second:
        return 0
    if first[0] == second[0]:
        return 1 + brute_force_lcs(first[1:], second[1:])
    return max(brute_force_lcs(first[1:], second), brute_force_lcs(first, second[1:]))


@given(sequences, sequences)
def test_lcs_members_are_a_longest_common_subsequence(target, output):
    members = lcs_members(target, output)
    kept = [token for token, is_member in zip(output, members, strict=True) if is_member]
    assert len(kept) == brute_force_lcs(target, output)
    remaining = iter(target)
    assert all(token in remaining for token in kept), "not a subsequence of the target"


@pytest.mark.parametrize(
    ("target", "output", "expected"),
    [([1], [1], 1.0), ([1], [2], 0.0), ([1], [], 0.0), ([1, 2, 3, 4], [4, 3, 2, 1], 0.25)],
)
def test_lcs_ratio_of_known_pairs(target, output, expected):
    assert lcs_ratio(target, output) == expected


@given(sequences.filter(bool), sequences.filter(bool))
def test_overlap_and_hits_agree_on_disjoint_and_equal(prompt, target):
    assert (overlap_ratio(prompt, target) == 0) == (target_hit_ratio(prompt, target) == 0)
    assert overlap_ratio(target, target) == target_hit_ratio(target, target) == 1


@given(st.lists(st.floats(-20.0, 0.0), min_size=1, max_size=5))
def test_perplexity_is_the_geometric_mean_of_inverse_probabilities(log_probs):
    expected = math.prod(math.exp(-p) for p in log_probs) ** (1 / len(log_probs))
    assert perplexity(log_probs) == pytest.approx(expected)


def test_perplexity_of_what_cannot_be_is_infinite():
    assert perplexity([-1e4]) == math.inf
