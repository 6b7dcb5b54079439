"""Bias and variance from a few draws: intervals, and noise that is subtracted."""

import math

import pytest
import torch
from helpers.toy_slot import ToyReader, normal, quadratic, toy_slot

from dlmi.gradient_rows import STATISTICS, Statistic
from dlmi.gradients.callback import GradientStudy
from dlmi.gradients.estimators import draw_gradients, hard_loss
from dlmi.gradients.statistics import (
    MIN_EVENTS,
    agreement,
    bias_max,
    expected_events,
    inner_products,
    jackknife,
    measure,
    spread,
    squared_norm,
    variance_max,
)
from dlmi.gradients.truth import Truth, exact_truth
from dlmi.methods import REINFORCE
from dlmi.methods.reinforce import REINFORCEState


def gaussian_study(draws, blocks, width, noise, truth_noise, seed):
    """Draws of a biased estimator, blocks of a truth, and what the statistics should be."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(mean, count, scale):
        return mean + scale * torch.randn(count, width, dtype=torch.float64, generator=generator)

    truth = normal(width, seed=100)
    mean = 0.6 * truth + 0.5 * normal(width, seed=101)
    expected = {
        "snr": float(mean.norm()) / (noise * math.sqrt(width)),
        "relative_variance": noise**2 * width / float(mean @ mean),
        "cosine": float(mean @ truth / mean.norm() / truth.norm()),
        "bias_over_norm": float((mean - truth).norm() / truth.norm()),
        "norm": float(mean.norm()),
    }
    return noisy(mean, draws, noise), noisy(truth, blocks, truth_noise), expected


def test_intervals_hold_what_they_promise():
    """95% intervals over 150 repetitions of five noisy draws; at the very least 90% must hold."""
    hits = dict.fromkeys(["snr", "relative_variance", "cosine", "bias_over_norm", "norm"], 0)
    for seed in range(150):
        draws, blocks, expected = gaussian_study(5, 8, 40, 1.0, 1.0, seed)
        own = inner_products(draws, draws)
        cross, truth = inner_products(draws, blocks), inner_products(blocks, blocks)
        found = {**spread(own), **agreement(own, cross, truth)}
        for name, value in expected.items():
            low, high = found[name].low, found[name].high
            above = low is None or low <= value
            hits[name] += above and (high is None or value <= high)
    assert min(hits.values()) >= 0.9 * 150, hits


def test_with_many_draws_the_values_are_right_and_the_intervals_narrow():
    draws, blocks, expected = gaussian_study(150, 40, 40, 1.0, 1.0, 0)
    own = inner_products(draws, draws)
    cross, truth = inner_products(draws, blocks), inner_products(blocks, blocks)
    found = {**spread(own), **agreement(own, cross, truth)}
    for name, value in expected.items():
        assert found[name].value == pytest.approx(value, rel=0.1)
        assert found[name].high - found[name].low < 0.5 * value


def test_noise_must_be_subtracted():
    """RLOO has no bias: corrected it is compatible with 0, plainly |mean - truth| it never is."""
    logits, reader = normal(2, 4), quadratic(2, 4)
    slot, method = toy_slot(logits), REINFORCE(4, "rloo")
    exact = exact_truth(hard_loss(method, slot, reader), logits).blocks[0]
    all_draws = draw_gradients(method, REINFORCEState(), slot, range(1000), reader)
    corrected, plain, square = [], [], float(exact @ exact)
    for draws in all_draws.split(5):
        own, cross = inner_products(draws, draws), inner_products(draws, exact[None])
        corrected.append(squared_norm(own, range(5)) - 2 * float(cross.mean()) + square)
        plain.append(float((draws.mean(0) - exact).square().sum()))
    corrected, plain = torch.tensor(corrected), torch.tensor(plain)
    error = float(corrected.std()) / math.sqrt(200)
    assert abs(float(corrected.mean())) < 4 * error
    assert float(plain.mean()) > 10 * error
    assert float(plain.min()) > 0


def test_halves_are_one_split_of_what_is_averaged_over_all():
    """Squared bias = the mean of <g_A - r_A, g_B - r_B> over all splits."""
    draws, blocks, _ = gaussian_study(4, 4, 10, 1.0, 1.0, 3)
    splits = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    values = []
    for g in splits:
        for r in (*splits, *((b, a) for a, b in splits)):
            first, second = (
                draws[list(g[i])].mean(0) - blocks[list(r[i])].mean(0) for i in range(2)
            )
            values.append(float(first @ second))
    everyone = list(range(4))
    own, truth = inner_products(draws, draws), inner_products(blocks, blocks)
    whole = squared_norm(own, everyone) + squared_norm(truth, everyone)
    whole -= 2 * float(inner_products(draws, blocks).mean())
    assert sum(values) / len(values) == pytest.approx(whole)


def test_maxima_are_those_of_the_definition_with_every_draw_left_out_in_turn():
    draws, blocks, _ = gaussian_study(6, 4, 12, 1.0, 0.5, 4)
    found = variance_max(draws)
    assert found.value == pytest.approx(float(draws.var(0).max()))
    logs = torch.tensor([math.log(draws[keep].var(0).max()) for keep in all_but_one(6)])
    error = math.sqrt(float(logs.var(correction=0)) * 5)
    assert math.log(found.high / found.value) == pytest.approx(2.5706 * error, rel=1e-3)  # t, 5
    bias = bias_max(draws, blocks)
    assert bias.value == pytest.approx(float((draws.mean(0) - blocks.mean(0)).abs().max()))
    assert 0 < bias.low < bias.value < bias.high


def all_but_one(count):
    return [[i for i in range(count) if i != out] for out in range(count)]


def test_jackknife_of_a_mean_is_the_textbook_interval():
    values = normal(9, seed=5)
    found = jackknife(lambda draws, _: float(values[draws].mean()), 9)
    reach = 2.306 * float(values.std()) / 3  # Student's quantile for 8
    assert found.value == pytest.approx(float(values.mean()))
    assert found.high - found.value == pytest.approx(reach, rel=1e-3)


def test_what_the_noise_hides_is_said_to_be_hidden():
    noise = torch.tensor([[1.0, 0.0], [-1.0, 0.1], [0.0, -1.0]])
    found = measure(noise, Truth("exact", 1, torch.ones(1, 2)))
    assert found["snr"].value == 0
    assert found["relative_variance"].value is None
    assert found["relative_variance"].high is None
    assert found["cosine"].value is None
    assert measure(noise, None)["bias_max"].value is None
    nothing = measure(torch.zeros(3, 2), Truth("exact", 1, torch.ones(1, 2)))
    assert nothing["variance_max"] == Statistic(None, None, None)
    assert nothing["bias_over_norm"].value == 1


def test_what_samples_cannot_show_is_left_undefined():
    """Few samples of many tokens: RLOO looks like a sure 0, which is not what it is."""
    tokens = 4000
    reader = ToyReader(lambda rows: rows[:, :, :2000].sum((1, 2)), tokens, torch.float32)
    logits, method = torch.zeros(1, tokens), REINFORCE(4, "rloo")
    slot, study = toy_slot(logits), GradientStudy(draws=4, truth="exact")
    [found] = study.measure(method, slot, reader, [method])
    defined = {name for name in STATISTICS if found[name].value is not None}
    assert defined == {"variance_max", "bias_max"}
    truth = exact_truth(hard_loss(method, slot, reader), logits)
    few, many = (expected_events(logits, draws, 4, truth) for draws in (4, 20_000))
    assert few == pytest.approx((4 * 3 / 2 * 16 / tokens, 16 / tokens))
    assert max(few) < MIN_EVENTS <= min(many)
