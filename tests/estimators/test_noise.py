"""Noise from counters: the right distribution, independent in every direction, and repeatable."""

import hashlib
import math

import numpy as np
import pytest
import torch
from scipy import stats

from dlmi.estimators.noise import UNIT, column_words, gumbel_noise
from dlmi.estimators.soft_embedding import sample_columns

CPU = torch.device("cpu")
SHAPE = (4, 50, 10_000)


def uniform(seed, shape=SHAPE, dtype=torch.float64):
    """The noise through its own distribution function: uniform on (0, 1)."""
    return torch.exp(-torch.exp(-gumbel_noise(seed, shape, CPU, dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_gumbel(dtype):
    noise = gumbel_noise(3, (2, 20, 10_000), CPU, dtype)
    assert noise.dtype == dtype
    assert noise.isfinite().all()
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_its_tails_are_right():
    values = uniform(5)
    for edge in (1e-2, 1e-4, 1e-5):
        for count in (int((values < edge).sum()), int((values > 1 - edge).sum())):
            expected = edge * values.numel()
            assert abs(count - expected) < 4.5 * math.sqrt(expected)


def test_every_row_and_every_column_is_uniform():
    values = uniform(6).flatten(0, 1)  # (200, 10000)
    for lines in (values, values.T[::50]):
        p_values = [stats.kstest(line.numpy(), "uniform").pvalue for line in lines]
        assert stats.kstest(p_values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("direction", ["sample", "position", "column", "seed", "next seed"])
def test_neighbours_are_independent(direction):
    values = uniform(7)
    first, second = {
        "sample": (values[:-1], values[1:]),
        "position": (values[:, :-1], values[:, 1:]),
        "column": (values[..., :-1], values[..., 1:]),
        "seed": (values, uniform(123_456_789)),
        "next seed": (values, uniform(8)),
    }[direction]
    bins = 20
    pairs = (first * bins).long() * bins + (second * bins).long()
    counts = torch.bincount(pairs.flatten(), minlength=bins**2).numpy()
    assert stats.chisquare(counts).pvalue > 1e-3
    correlation = np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1]
    assert abs(correlation) < 4 / math.sqrt(first.numel())


def test_no_pair_of_rows_is_alike():
    rows = uniform(9, (1, 300, 20_000)).squeeze(0)
    correlations = torch.corrcoef(rows) - torch.eye(300)
    assert correlations.abs().max() < 6 / math.sqrt(20_000)


@pytest.mark.parametrize("columns", [1, 49_152, 151_936, 256_000])
def test_no_two_columns_share_a_word(columns):
    assert len(column_words(columns, CPU).unique()) == columns


def test_only_columns_that_collide_are_hashed_again():
    """Of 151,936 words one is another than a single hash gives, and the later column has it."""

    def digest(words):
        return hashlib.sha256(words.numpy().tobytes()).hexdigest()

    few, words = column_words(49_152, CPU), column_words(151_936, CPU)
    assert digest(few) == "fd9263315a38988b11943a164141c476482f664925388151c61aadae4bd7a645"
    assert torch.equal(words[:49_152], few)
    hashed_once = words.clone()
    hashed_once[140_572] = words[21_412]
    assert digest(hashed_once) == "9d866ec248d22a07347fcb465dbba96b22089c646ceefce52722a57514870b47"


def test_columns_that_collided_have_their_own_noise():
    [[noise]] = gumbel_noise(2, (1, 1, 151_936), CPU, torch.float32)
    assert noise[21_412] != noise[140_572]
    columns = sample_columns(torch.zeros(1, 151_936), 4, 2)
    noise = gumbel_noise(2, (4, 1, 151_936), CPU, torch.float32)
    assert torch.equal(columns, noise.argmax(-1))


def test_it_follows_the_seed_and_not_what_is_drawn_beside_it():
    whole = gumbel_noise(11, (3, 6, 40), CPU, torch.float32)
    assert torch.equal(whole, gumbel_noise(11, (3, 6, 40), CPU, torch.float32))
    assert torch.equal(whole[:1, :2], gumbel_noise(11, (1, 2, 40), CPU, torch.float32))
    assert torch.equal(whole[..., :17], gumbel_noise(11, (3, 6, 17), CPU, torch.float32))
    tail = gumbel_noise(11, (3, 2, 40), CPU, torch.float32, first=4)
    assert torch.equal(whole[:, 4:], tail)
    assert not torch.equal(whole, gumbel_noise(12, (3, 6, 40), CPU, torch.float32))


def test_precision_changes_rounding_only():
    single = gumbel_noise(13, (2, 3, 5000), CPU, torch.float32)
    double = gumbel_noise(13, (2, 3, 5000), CPU, torch.float64)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)
    assert (double - double.float()).abs().max() > 0  # not float32 in disguise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_most_extreme_words_stay_finite(dtype):
    words = torch.tensor([0, 1, 2**31 - 1], dtype=torch.int32)
    u = (words.to(dtype) + 0.5) * UNIT
    noise = -torch.log(-torch.log1p(-u))
    assert noise.isfinite().all()
    assert noise[0] > 21
    assert noise[2] < -2.5


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 + 5])
def test_any_integer_is_a_seed(seed):
    assert gumbel_noise(seed, (1, 1, 10), CPU, torch.float32).isfinite().all()
