"""Bias and variance of gradient estimators: against enumeration, in a fit, as a command."""

import dataclasses
import hashlib
import itertools
import json
import math
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dlmi import InputError
from dlmi.callbacks import GradientStudy
from dlmi.cli import main
from dlmi.gradients import GradientRow, Statistic, ks_tests, median_statistic, read_gradient_rows
from dlmi.gradients.coverage import Coverage
from dlmi.gradients.intervals import jackknife
from dlmi.gradients.measured import ESTIMATORS, draw_gradient
from dlmi.gradients.objective import Objective, sample_prompts, target_objective
from dlmi.gradients.statistics import (
    agreement,
    bias_max,
    inner_products,
    measure,
    spread,
    squared_norm,
    variance_max,
)
from dlmi.gradients.study import State, StudySettings, choose_coordinates, measure_state
from dlmi.gradients.truth import (
    Truth,
    as_in_code_reference,
    conditional_truth,
    exact_truth,
    rloo_truth,
)
from dlmi.methods import DLMI, GBDA, GCG, REINFORCE
from dlmi.score_function import moving_average, score_function_gradient
from dlmi.soft_embedding import sample_columns
from dlmi.targets import texts_to_targets
from dlmi.vocabulary import Vocabulary

N, V = 2, 4
CONFIGS = Path(__file__).parent.parent / "configs" / "gradients"


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


LOGITS, WEIGHTS = normal(N, V), normal(N * V, N * V, seed=1)


def quadratic(rows):
    flat = rows.flatten(-2)
    return (flat @ WEIGHTS * flat).sum(-1)


TOY = Objective(torch.eye(V, dtype=torch.float64), quadratic)
EXACT = exact_truth(TOY, LOGITS).blocks[0]


def seed_for(purpose, run=0):
    digest = hashlib.blake2b(f"{run}/{purpose}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def assert_compatible(draws, expected, errors=4.0):
    standard_error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() < errors * standard_error + 1e-12).all()


# ---- the truth


def test_enumeration_is_the_gradient_of_the_enumerated_expectation():
    logits = LOGITS.clone().requires_grad_()
    expectation = 0.0
    for prompt in itertools.product(range(V), repeat=N):
        columns = torch.tensor(prompt)
        probability = torch.log_softmax(logits, -1)[torch.arange(N), columns].sum().exp()
        expectation = expectation + probability * TOY.hard_losses(columns[None])[0]
    (gradient,) = torch.autograd.grad(expectation, logits)
    torch.testing.assert_close(EXACT, gradient.flatten())
    torch.testing.assert_close(EXACT.view(N, V).sum(-1), torch.zeros(N, dtype=torch.float64))


def test_enumeration_on_the_tiny_lm_is_what_its_definition_says(tiny):
    """pi (E[L | x_j = v] - J), with the expectations written out."""
    [target] = texts_to_targets(tiny, ["w1 w2"])
    objective = target_objective(Vocabulary(tiny), target, "cross_entropy", False, False)
    tokens = len(tiny.prompt_token_ids)
    logits = normal(2, tokens, seed=2)
    found = exact_truth(objective, logits).blocks[0].view(2, tokens)
    p = torch.softmax(logits, -1)
    columns = torch.cartesian_prod(torch.arange(tokens), torch.arange(tokens))
    losses = objective.hard_losses(columns).view(tokens, tokens)
    value = p[0] @ losses @ p[1]
    torch.testing.assert_close(found[0], p[0] * (losses @ p[1] - value))
    torch.testing.assert_close(found[1], p[1] * (p[0] @ losses - value))


@pytest.mark.parametrize("kind", ["rloo", "conditional"])
def test_estimated_truths_are_within_four_standard_errors(kind):
    if kind == "rloo":
        truth = rloo_truth(TOY, LOGITS, 20_000, 50, [seed_for(i) for i in range(50)])
        assert truth.coordinates is None
    else:
        truth = conditional_truth(TOY, LOGITS, torch.tensor([1, 4, 6]), 5000, 50, seed=5)
    assert_compatible(truth.blocks, truth.restrict(EXACT[None])[0])


def test_conditional_truth_is_exact_where_it_has_nothing_to_average():
    """At N = 1 each prompt's loss is known; only L(x) is left to chance, and it is common."""
    objective = Objective(TOY.matrix, lambda embeds: embeds[:, 0] @ WEIGHTS[0, :V])
    logits = LOGITS[:1]
    truth = conditional_truth(objective, logits, torch.arange(V), 4000, 40, seed=6)
    assert_compatible(truth.blocks, exact_truth(objective, logits).blocks[0])


def test_hard_prompts_follow_the_distribution():
    columns = sample_prompts(LOGITS, 40_000, 7)
    for position in range(N):
        shares = torch.bincount(columns[:, position], minlength=V) / 40_000
        torch.testing.assert_close(
            shares.double(), torch.softmax(LOGITS, -1)[position], atol=0.01, rtol=0
        )
    assert torch.equal(columns, sample_prompts(LOGITS, 40_000, 7))


def test_the_authors_reference_is_a_hundredth_of_the_truth():
    """(4/5) (1/10) (1/8) at S = 8, and noise many times as large in a single one."""
    references = torch.cat(
        [
            as_in_code_reference(TOY, LOGITS, 8, [seed_for(c, run) for c in range(5)]).blocks
            for run in range(900)
        ]
    )
    assert_compatible(references, 0.01 * EXACT)
    ratios = references @ EXACT / (EXACT @ EXACT)
    error = float(ratios.std()) / 30
    assert abs(float(ratios.mean()) - 0.01) < 4 * error
    assert 4 * error < 0.006
    assert float(ratios.std()) > 0.01
    assert as_in_code_reference(TOY, LOGITS, 8, range(5)).kind == "as_in_code"


def test_a_fresh_helper_has_no_advantage_at_first():
    columns = sample_columns(LOGITS, 8, 3)
    losses = TOY.hard_losses(columns)
    average, kept = moving_average("as_code", None, losses.mean())
    gradient = score_function_gradient(LOGITS, columns, losses, "as_code", average)
    assert gradient.abs().max() < 1e-12
    used, _ = moving_average("as_code", kept, torch.tensor(2.0))
    assert 2.0 - float(used) == pytest.approx(0.1 * (2.0 - float(kept)))


def test_against_the_authors_reference_the_order_of_temperatures_turns_round():
    """Their bias is the gradient's own scale: smallest at tau = 100, where the bias is largest."""
    settings = {"draws": 40, "truth_samples": 64}
    names = ("gs_tau1", "gs_tau100")
    found = {}
    for kind in ("exact", "as_in_code"):
        state = State(LOGITS, torch.zeros(N, dtype=torch.float64))
        study = StudySettings(truth=kind, **settings)
        chosen = [ESTIMATORS[name] for name in names]
        for m in measure_state(TOY, state, chosen, study, 8, seed_for):
            found[kind, m.estimator.tau0] = m.statistics["bias_max"].value
    assert found["exact", 100] > found["exact", 1]
    assert found["as_in_code", 100] < 0.1 * found["as_in_code", 1]


# ---- the estimators


@pytest.mark.parametrize("name", ESTIMATORS)
def test_draws_follow_the_seed_and_leave_the_logits_alone(name):
    estimator = ESTIMATORS[name]
    logits, tau = LOGITS.clone(), estimator.tau(torch.zeros(N, dtype=torch.float64))
    average = torch.tensor(0.3, dtype=torch.float64)
    one, again, other = (
        draw_gradient(estimator, TOY, logits, tau, 3, seed, average) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == (N, V)
    assert torch.equal(logits, LOGITS)
    assert not logits.requires_grad
    assert float(one.sum(-1).abs().max()) < 1e-9  # along a constant no softmax changes


def test_unbiased_estimators_hit_the_truth():
    average = torch.tensor(0.3, dtype=torch.float64)
    for name in ("reinforce", "rloo"):
        estimator = ESTIMATORS[name]
        draws = [
            draw_gradient(estimator, TOY, LOGITS, LOGITS[:, 0], 8, seed_for(i), average).flatten()
            for i in range(1000)
        ]
        assert_compatible(torch.stack(draws), EXACT)


def test_temperatures_follow_phi_under_their_own_scale():
    phi = torch.tensor([-1.0, 2.0])
    law = 1 + torch.tanh(phi)
    torch.testing.assert_close(ESTIMATORS["gs_tau100"].tau(phi), torch.full((2,), 100.0))
    torch.testing.assert_close(ESTIMATORS["gs_decoupled_tau100"].tau(phi), 100 * law)
    shared = (1 + torch.tanh(torch.tensor(0.5))).expand(2)
    torch.testing.assert_close(ESTIMATORS["gs_shared_tau1"].tau(phi), shared)
    labels = {estimator.label for estimator in ESTIMATORS.values()}
    assert labels >= {"REINFORCE", "RLOO", "GS tau=1", "GS L tau0=100", "GS D+L tau0=1", "ST tau=1"}
    assert len(labels) == len(ESTIMATORS)


def test_chosen_logits_are_half_the_largest_and_half_drawn():
    peaked = torch.zeros(2, 50)
    peaked[:, 7] = 9.0
    pilot = torch.zeros(100)
    pilot[[90, 91, 92]] = torch.tensor([3.0, -2.0, 1.0])
    chosen = choose_coordinates(peaked, iter([pilot]), 4, seed=0).tolist()
    assert {90, 91} < set(chosen)
    assert {7, 57} & set(chosen)
    assert len(chosen) == 4
    assert len(choose_coordinates(peaked, iter([pilot]), 1000, seed=0)) == 100


# ---- the statistics


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
    average = torch.zeros((), dtype=torch.float64)
    corrected, plain, square = [], [], float(EXACT @ EXACT)
    for run in range(200):
        draws = torch.stack(
            [
                draw_gradient(
                    ESTIMATORS["rloo"], TOY, LOGITS, LOGITS[:, 0], 4, seed_for(i, run), average
                ).flatten()
                for i in range(5)
            ]
        )
        own, cross = inner_products(draws, draws), inner_products(draws, EXACT[None])
        corrected.append(squared_norm(own, range(5)) - 2 * float(cross.mean()) + square)
        plain.append(float((draws.mean(0) - EXACT).square().sum()))
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
    objective = Objective(torch.eye(tokens), lambda embeds: embeds[:, :, :2000].sum((1, 2)))
    logits = torch.zeros(1, tokens)
    settings = StudySettings(draws=4, truth="exact")
    state = State(logits, torch.zeros(1))
    [found] = measure_state(objective, state, [ESTIMATORS["rloo"]], settings, 4, seed_for)
    defined = {name for name, statistic in found.statistics.items() if statistic.value is not None}
    assert defined == {"variance_max", "bias_max"}
    truth = exact_truth(objective, logits)
    few, many = (Coverage.of(logits, draws, 4, truth) for draws in (4, 20_000))
    assert few.pairs == pytest.approx(4 * 3 / 2 * 16 / tokens)
    assert few.truth_hits == pytest.approx(16 / tokens)
    assert not few.shows_spread
    assert many.shows_spread
    assert many.shows_agreement


# ---- rows and comparisons


def row(estimator="GS tau=1", value=1.0, **options):
    statistic = Statistic(value, value / 2, value * 2)
    values = {
        "estimator": estimator,
        "trajectory": "own",
        "target_id": "k1_0",
        "k": 1,
        "step": 0,
        "seed": 0,
        "prompt_length": 2,
        "target_length": 3,
        "num_samples": 8,
        "draws": 5,
        "tau": 1.0,
        "truth": None,
        "loss": "cross_entropy",
        "teacher_forcing": False,
        "model": "m",
        "revision": None,
        "fingerprint": "f",
        "dtype": "float32",
        "device": "cpu",
        "versions": {},
        **dict.fromkeys(("variance_max", "relative_variance", "snr", "norm"), statistic),
        **dict.fromkeys(("bias_max", "cosine", "bias_over_norm"), Statistic(None, None, None)),
    }
    return GradientRow(**{**values, **options})


def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "gradients.jsonl"
    good = row().to_json_line()
    lines = [good, "{half\n", "\n", '{"estimator": "x"}\n', "3\n", good, good[: len(good) // 2]]
    path.write_text("".join(lines))
    rows, notes = read_gradient_rows(tmp_path)
    assert rows == [row(), row()]
    assert notes == [f"{path}, line {number}" for number in (2, 4, 5, 7)]
    with pytest.raises(InputError, match="gradients.jsonl or its run folder"):
        read_gradient_rows(tmp_path / "nowhere")


def test_row_documents_every_column():
    for field in dataclasses.fields(GradientRow):
        assert f"        {field.name}: " in GradientRow.__doc__


def test_ks_tests_tell_estimators_apart_only_where_they_differ():
    values = {"A": normal(40), "B": normal(40, seed=1), "C": normal(40, seed=2) + 3}
    rows = [row(name, float(v)) for name, many in values.items() for v in many]
    tests = {(t.first, t.second): t for t in ks_tests(rows)}
    assert set(tests) == {("A", "B"), ("A", "C"), ("B", "C")}  # no bias was measured
    assert tests["A", "B"].adjusted_p_value > 0.05
    assert tests["A", "C"].adjusted_p_value < 1e-6
    assert tests["A", "C"].distance > 0.8
    assert tests["A", "C"].sizes == (40, 40)
    assert all(t.adjusted_p_value >= t.p_value for t in tests.values())
    assert ks_tests([]) == []


def test_medians_of_values_and_of_the_ends_of_intervals():
    rows = [row(value=value) for value in (1.0, 2.0, 9.0)]
    median, count = median_statistic(rows, "GS tau=1", "snr")
    assert (median, count) == (Statistic(2.0, 1.0, 4.0), 3)
    assert median_statistic(rows, "GS tau=1", "cosine")[1] == 0


# ---- in a fit


SMALL = {"prompt_length": 3, "steps": 5, "eval_every": 2, "num_samples": 2}
FEW = {"variance_every": 2, "bias_every": 4, "draws": 3, "truth_samples": 12, "truth_blocks": 3}
RUNS = {
    "DLMI": (DLMI, {"tau0": 1.0}),
    "GBDA": (GBDA, {"tau": 2.0, "tau_end": 0.5}),
    "REINFORCE": (REINFORCE, {}),
}


def outcome(row):
    """All of a result row but its times."""
    values = dataclasses.asdict(row)
    del values["seconds"]
    trace = [dataclasses.replace(point, seconds=0.0) for point in row.trace]
    return {**values, "trace": trace}


@pytest.mark.parametrize("name", RUNS)
def test_a_fit_does_not_notice_that_it_is_studied(name, data, fit, tmp_path):
    method, options = RUNS[name]
    names = list(ESTIMATORS) if name == "DLMI" else ["reinforce", "gs_shared_tau1", "gumbel_rao"]
    targets, same_targets = (data(k=(1, 2, 3), per_k=1) for _ in range(2))
    torch.manual_seed(3)
    bare = fit(method(**SMALL, **options), targets)
    after_bare = torch.get_rng_state()
    torch.manual_seed(3)
    study = GradientStudy(names, **FEW)
    studied = fit(method(**SMALL, **options), same_targets, callbacks=[study])
    assert {i: outcome(r) for i, r in studied.items()} == {i: outcome(r) for i, r in bare.items()}
    assert torch.equal(torch.get_rng_state(), after_bare)
    rows, notes = read_gradient_rows(tmp_path)
    assert not notes
    assert len({r.key for r in rows}) == len(rows)
    by_target = {target_id: r.steps for target_id, r in studied.items()}
    states = {(i, s) for i, steps in by_target.items() for s in range(0, steps, 2)}
    assert {(r.target_id, r.step) for r in rows} == states
    assert len(rows) == len(states) * len(names)
    for r in rows:
        assert (r.truth is not None) == (r.step % 4 == 0)
        assert (r.tau is None) == (r.estimator in ("REINFORCE", "RLOO"))
        assert r.variance_max.value > 0
        assert r.bias_max.value is None or r.truth["kind"] == "rloo"


def test_time_of_a_study_is_not_charged_to_the_targets(data, fit, monkeypatch):
    slept = 0.0

    def slow(self, *arguments):
        nonlocal slept
        before = time.perf_counter()
        time.sleep(0.1)
        slept += time.perf_counter() - before

    monkeypatch.setattr(GradientStudy, "_measure", slow)
    start = time.perf_counter()
    rows = fit(
        DLMI(**SMALL, tau0=1.0), data(per_k=1, batch_size=1), callbacks=[GradientStudy(**FEW)]
    )
    elapsed = time.perf_counter() - start
    assert slept > 0.5
    # One target at a time: all that they are charged fits into what was not slept.
    assert sum(r.seconds for r in rows.values()) < elapsed - slept


@pytest.mark.parametrize("kind", ["exact", "conditional", "as_in_code"])
def test_other_truths_in_a_fit(kind, data, fit, tmp_path):
    study = GradientStudy(["rloo", "gs_tau1"], 4, 4, 4, kind, 12, 3, coordinates=10)
    fit(DLMI(**{**SMALL, "prompt_length": 2}, tau0=1.0), data(per_k=1), callbacks=[study])
    rows, _ = read_gradient_rows(tmp_path)
    assert {r.truth["kind"] for r in rows} == {kind}
    assert {r.truth["coordinates"] for r in rows} == {10 if kind == "conditional" else None}
    assert all(r.bias_max.value > 0 for r in rows)
    assert {r.trajectory for r in rows} == {"GS D+L tau0=1"}


def test_a_resumed_fit_measures_no_state_twice(data, fit, tmp_path):
    def run(**options):
        study = GradientStudy(["gs_tau1"], 2, 100, 3, truth_samples=12, truth_blocks=3)
        keep = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=2, save_last=True)
        options = {"callbacks": [study, keep], "enable_checkpointing": True, **options}
        fit(DLMI(**SMALL, tau0=1.0), data(per_k=1), **options)
        return read_gradient_rows(tmp_path)[0]

    first = run(max_steps=3)
    rows = run(ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert len(rows) > len(first)
    assert len({r.key for r in rows}) == len(rows)


def test_runs_that_cannot_be_studied_are_refused(data, fit, tmp_path):
    cases = [
        (GCG(prompt_length=3, steps=2, search_width=4, topk=4), {}, "DLMI, GBDA or REINFORCE"),
        (DLMI(**{**SMALL, "prompt_length": 9}), {"truth": "exact"}, "at most 65536 prompts"),
        (DLMI(**{**SMALL, "num_samples": 1}), {}, "at least 2 samples"),
        (
            DLMI(**SMALL, teacher_forcing=False, next_token="gumbel_softmax"),
            {},
            "next_token: greedy",
        ),
    ]
    for method, options, message in cases:
        with pytest.raises(InputError, match=message):
            fit(method, data(), callbacks=[GradientStudy(**options)])
    (tmp_path / "gradients.jsonl").write_text("")
    with pytest.raises(InputError, match="exists"):
        fit(DLMI(**SMALL), data(), callbacks=[GradientStudy(**FEW)])


# ---- from the command line


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["gradients", *map(str, arguments)])
    return stop.value.code or 0


@pytest.fixture
def tiny_flags(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [
        *("--data.lm", model_folder(), "--data.k", "[1]", "--data.per_k", 1),
        *("--data.target_length", 3, "--run.prompt_length", 2, "--run.steps", 3),
        *("--run.num_samples", 2, "--study.variance_every", 2, "--study.bias_every", 2),
        *("--study.draws", 3, "--study.truth_samples", 12, "--study.truth_blocks", 3),
    ]


@pytest.mark.parametrize("name", ["small.yaml", "paper.yaml"])
def test_shipped_configs_run(name, tiny_flags, tmp_path, capsys):
    text = (CONFIGS / name).read_text()
    assert text.startswith("# ")
    assert f"python -m dlmi gradients --config configs/gradients/{name}" in text
    assert run("--config", CONFIGS / name, *tiny_flags, "--seeds", "[1]") == 0
    rows, notes = read_gradient_rows(tmp_path / "gradients")
    assert not notes
    assert {r.step for r in rows} <= {0, 2}
    assert len({r.estimator for r in rows}) == (11 if name == "small.yaml" else 7)
    out = capsys.readouterr().out
    assert "Kolmogorov-Smirnov" in out
    assert "GS tau=100" in out


def test_own_trajectories_differ_and_a_common_one_is_shared(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--study.estimators", "[reinforce, gs_tau1]", "--seeds", "[1,2]"]
    assert run(*flags, "--out", "own") == 0
    assert run(*flags, "--out", "common", "--trajectory", "gs_shared_tau1") == 0
    own, _ = read_gradient_rows(tmp_path / "own")
    common, _ = read_gradient_rows(tmp_path / "common")
    assert {r.trajectory for r in own} == {"own"}
    assert {r.trajectory for r in common} == {"GS L tau0=1"}
    assert {r.seed for r in own} == {r.seed for r in common} == {1, 2}
    first = json.loads((tmp_path / "own" / "gradients.jsonl").read_text().splitlines()[0])
    assert set(first["variance_max"]) == {"value", "low", "high"}
    assert run(*flags, "--out", "own") == 2  # nothing is overwritten


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trajectory", "nope"], "trajectory"),
        (["--study.estimators", "[nope]"], "estimators"),
        (["--study.estimators", "[]"], "`study.estimators`"),
        (["--study.draws", "2"], "`study.draws` to be at least 3"),
        (["--study.bias_every", "0"], "`study.bias_every`"),
        (["--study.truth_blocks", "2"], "`study.truth_blocks` to be at least 3"),
        (["--study.truth_samples", "5"], "`study.truth_samples`"),
        (["--study.coordinates", "0"], "`study.coordinates`"),
        (["--study.truth", "exact", "--run.prompt_length", "9"], "`truth: exact`"),
        (["--study.truth", "guess"], "truth"),
        (["--run.steps", "0"], "`run.steps`"),
        (["--run.lr", "0"], "`run.lr`"),
        (["--run.num_samples", "1"], "num_samples"),
        (["--seeds", "[]"], "`--seeds`"),
        (["--out", "a_file"], "`--out`"),
        (["--data.k", "[40]"], "`k`"),
        (["--nonsense", "1"], "nonsense"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "run: null"], "`run"),
        (["--config", "run: {prompt_length: null}"], "`run.prompt_length` to have a value"),
        (["--config", "trajectory: null"], "`trajectory`"),
    ],
)
def test_bad_input_is_one_clear_line(flags, expected, tiny_flags, tmp_path, capfd):
    (tmp_path / "a_file").write_text("")
    assert run(*tiny_flags, *flags) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("dlmi: error: "), lines
    assert expected in lines[-1]
    assert len(lines) == 1, lines
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a_file"], "left something behind"
