import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from dlmi.metrics import (
    ExactRate,
    LCSRatio,
    OverlapRatio,
    PromptPerplexity,
    TargetHitRatio,
    lcs_length,
    lcs_members,
    lcs_ratio,
    overlap_ratio,
    target_hit_ratio,
)

sequences = st.lists(st.integers(0, 4), max_size=7)


def brute_force_lcs(first, second):
    if not first or not second:
        return 0
    if first[0] == second[0]:
        return 1 + brute_force_lcs(first[1:], second[1:])
    return max(brute_force_lcs(first[1:], second), brute_force_lcs(first, second[1:]))


@given(sequences, sequences)
def test_lcs_equals_brute_force(first, second):
    assert lcs_length(first, second) == brute_force_lcs(first, second)


@given(sequences, sequences)
def test_lcs_members_are_a_longest_common_subsequence(target, output):
    members = lcs_members(target, output)
    kept = [token for token, is_member in zip(output, members, strict=True) if is_member]
    assert len(kept) == lcs_length(target, output)
    remaining = iter(target)
    assert all(token in remaining for token in kept), "not a subsequence of the target"


@pytest.mark.parametrize(
    ("target", "output", "expected"),
    [([1], [1], 1.0), ([1], [2], 0.0), ([1], [], 0.0), ([1, 2, 3, 4], [4, 3, 2, 1], 0.25)],
)
def test_lcs_ratio_of_known_pairs(target, output, expected):
    assert lcs_ratio(target, output) == expected


def test_lcs_ratio_needs_a_target():
    with pytest.raises(ValueError, match="target_ids"):
        lcs_ratio([], [1])


@given(sequences.filter(bool), sequences.filter(bool))
def test_overlap_and_hits_agree_on_disjoint_and_equal(prompt, target):
    assert (overlap_ratio(prompt, target) == 0) == (target_hit_ratio(prompt, target) == 0)
    assert overlap_ratio(target, target) == target_hit_ratio(target, target) == 1


# Two sequences for each target; ranks get unequal shares, so a mean of means would be wrong.
PAIRS = [([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [3, 9, 9]), ([4, 5], [6, 7])]
METRICS = {
    LCSRatio: [1, 1 / 3, 0],
    ExactRate: [1, 0, 0],
    OverlapRatio: [1, 1 / 3, 0],
    TargetHitRatio: [1, 1 / 2, 0],
}


def update_share(rank, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    share = PAIRS[:1] if rank == 0 else PAIRS[1:]
    try:
        for kind, expected in METRICS.items():
            metric = kind()
            for pair in share:
                metric.update(*pair)
            assert float(metric.compute()) == pytest.approx(sum(expected) / 3), kind
        metric = PromptPerplexity()
        for value in (10.0,) if rank == 0 else (100.0, 1e6):
            metric.update(value)
        assert float(metric.compute()) == pytest.approx(1e3, rel=1e-5)
    finally:
        dist.destroy_process_group()


def test_metrics_are_right_across_ranks(tmp_path):
    mp.spawn(update_share, args=(f"file://{tmp_path / 'store'}",), nprocs=2)


@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=5))
def test_prompt_perplexity_is_the_geometric_mean(values):
    metric = PromptPerplexity()
    for value in values:
        metric.update(value)
    expected = math.exp(sum(map(math.log, values)) / len(values))
    torch.testing.assert_close(float(metric.compute()), expected, rtol=1e-5, atol=0)
