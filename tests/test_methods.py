"""What is particular to each method, against truths worked out by hand or by exhaustion."""

import itertools
import math

import pytest
import torch
from conftest import SMALL
from test_contracts import LossCurve

from dlmi import InputError
from dlmi.candidates import score_candidates
from dlmi.losses import target_loss, target_mask
from dlmi.methods import ADC, DLMI, GBDA, GCG, PEZ, REINFORCE, SODA
from dlmi.methods.adc import keep_largest, sparsity_counts
from dlmi.methods.gcg import propose_swaps
from dlmi.methods.pez import nearness
from dlmi.methods.soda import DecayingAdam
from dlmi.norm_gradients import scaled_norm_gradients
from dlmi.slots import Budget, Slot
from dlmi.soft_embedding import sample_columns
from dlmi.targets import Target


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- losses


def test_losses_by_hand_with_rows_of_different_lengths():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator())
    target_ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    mask = target_mask(torch.tensor([3, 1]), 3)
    log_q = torch.log_softmax(logits, -1)
    others = logits.clone()
    pairs = [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4)]
    for row, position, token in pairs:
        others[row, position, token] = -math.inf
    by_hand = {
        "cross_entropy": lambda r, j, v: -log_q[r, j, v],
        "margin": lambda r, j, v: log_q[r, j].max() - log_q[r, j, v],
        "hinge": lambda r, j, v: (1 + others[r, j].max() - logits[r, j, v]).clamp_min(0),
    }
    for name, per_token in by_hand.items():
        first = sum(per_token(*pair) for pair in pairs[:3]) / 3
        expected = torch.stack([first, per_token(*pairs[3])])
        torch.testing.assert_close(target_loss(name, logits, target_ids, mask), expected)


def test_margin_is_zero_exactly_where_the_target_is_the_argmax():
    logits = torch.randn(4, 2, 6, generator=generator())
    best = logits.argmax(-1)
    mask = torch.ones_like(best, dtype=torch.bool)
    assert (target_loss("margin", logits, best, mask) == 0).all()
    assert (target_loss("margin", logits, (best + 1) % 6, mask) > 0).all()


# ---- DLMI and GBDA: what a gradient must obey


@pytest.mark.parametrize("loss", ["cross_entropy", "margin", "hinge"])
@pytest.mark.parametrize("method", [DLMI, GBDA, REINFORCE, SODA, GCG, PEZ, ADC])
def test_every_method_takes_every_loss(method, loss, data, fit):
    small = {GCG: {"search_width": 4, "topk": 4}, ADC: {"restarts": 2}}.get(method, {})
    rows = fit(method(**{**SMALL, "steps": 2}, loss=loss, **small), data())
    assert len(rows) == 4


@pytest.mark.parametrize("temperature", ["fixed", "shared", "decoupled"])
@pytest.mark.parametrize("teacher_forcing", [True, False])
@pytest.mark.parametrize("estimator", ["gumbel_softmax", "straight_through"])
def test_every_cell_of_the_ablation_moves_what_it_learns(
    temperature, teacher_forcing, estimator, data, fit
):
    model = DLMI(
        **{**SMALL, "steps": 3},
        tau0=1.0,
        num_samples=2,
        temperature=temperature,
        teacher_forcing=teacher_forcing,
        estimator=estimator,
    )
    moved = {}

    class Watch(LossCurve):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for name, parameter in pl_module.named_parameters():
                moved[name] = bool((parameter.grad != 0).any())

    fit(model, data(batch_size=1, per_k=1, k=(3,)), callbacks=[Watch()])
    learned = {"Z.0": True} if temperature == "fixed" else {"Z.0": True, "Phi.0": True}
    assert moved == learned
    if temperature != "fixed":
        assert model.Phi[0].shape == ((5,) if temperature == "decoupled" else ())


def test_gradient_reaches_through_sampled_next_tokens(data, fit):
    """With a soft next token, the prompt's loss depends on it through what was generated."""

    def gradient(next_token):
        model = DLMI(**{**SMALL, "steps": 1}, teacher_forcing=False, next_token=next_token)
        gradients = []
        model.on_before_optimizer_step = lambda optimizer: gradients.append(model.Z[0].grad.clone())
        fit(model, data(batch_size=1, per_k=1, k=(3,)))
        return gradients[0]

    soft, greedy = gradient("gumbel_softmax"), gradient("greedy")
    assert soft.isfinite().all()
    assert not torch.allclose(soft, greedy)


def test_annealing_reaches_its_end(data, fit):
    model = GBDA(**{**SMALL, "steps": 10}, tau=100.0, tau_end=0.01)
    seen = []

    class Watch(LossCurve):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(float(pl_module.tau(pl_module.slots[0])[0]) if pl_module.slots[0] else 0)

    fit(model, data(batch_size=1, per_k=1, k=(3,)), callbacks=[Watch()])
    expected = [100 * (0.01 / 100) ** (step / 10) for step in range(10)]
    torch.testing.assert_close(torch.tensor(seen[:10]), torch.tensor(expected))


def test_final_samples_only_ever_help_and_are_charged(data, fit):
    plain = fit(GBDA(**SMALL, num_samples=2), data())
    with_samples = fit(GBDA(**SMALL, num_samples=2, final_samples=40), data())
    assert all(with_samples[i].lcs >= plain[i].lcs for i in plain)
    assert any(with_samples[i].lcs > plain[i].lcs for i in plain)
    row_tokens = 5 + 4 - 1
    for i, row in with_samples.items():
        if row.steps == plain[i].steps == 12:
            # Each is read once, and decoded from its first wrong token on.
            extra = row.forward_tokens - plain[i].forward_tokens
            assert 40 * row_tokens < extra <= 40 * (row_tokens + 3)


# ---- REINFORCE


def test_reinforce_sends_nothing_backward(data, fit):
    row = next(iter(fit(REINFORCE(**SMALL, num_samples=3), data()).values()))
    assert row.backward_tokens == 0
    in_steps = 3 * row.steps * (5 + 4 - 1)
    evaluations = len(row.trace)
    assert in_steps + 8 <= row.forward_tokens <= in_steps + evaluations * (8 + 3)


def surrogate_gradients(baseline, losses):
    """Gradients of a sequence of steps of one slot, and its averages, with given losses."""
    model = REINFORCE(**SMALL, baseline=baseline, num_samples=4)
    model.Z = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(5, 7))])
    slot = Slot.open(0, Target("t", (1,), "t"), 0, torch.device("cpu"))
    gradients, averages = [], []
    for values in losses:
        columns = sample_columns(model.Z[0], 4, slot.noise_seed())
        surrogate = model._surrogate(slot, columns, torch.tensor(values))
        gradients.append(torch.autograd.grad(surrogate, model.Z[0])[0])
        averages.append(float(slot.memory["average"]))
    return gradients, averages


def test_ema_baseline_is_updated_after_use():
    losses = [[4.0, 4.0, 4.0, 4.0], [2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]
    gradients, averages = surrogate_gradients("ema", losses)
    assert averages == pytest.approx([4.0, 3.8, 3.62])
    assert (gradients[0] == 0).all()  # the first average is the first loss itself
    assert (gradients[1] != 0).any()  # 2 against the old average of 4


def test_as_code_weighs_the_newest_loss_and_starts_at_zero():
    gradients, averages = surrogate_gradients("as_code", [[4.0] * 4, [2.0] * 4])
    assert averages == pytest.approx([4.0, 0.1 * 4 + 0.9 * 2])
    assert (gradients[0] == 0).all()


# ---- SODA


def test_soda_updates_follow_the_trace_worked_out_by_hand():
    """First step 1.41 lr; without decay a constant gradient peaks near 2.97 lr at step 12."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    options = {"lr": 1.0, "betas": (0.9, 0.995), "eps": 1e-8, "decay": 1.0, "reset_every": 50}
    optimizer = DecayingAdam([parameter], **options)
    sizes = []
    for _ in range(62):
        before = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        sizes.append(float(before - parameter.detach()))
    assert sizes[0] == pytest.approx(0.1 / 0.005**0.5, rel=1e-6)  # 1.414
    assert max(sizes[:50]) == pytest.approx(2.97, abs=0.01)
    assert sizes.index(max(sizes[:50])) + 1 == 12
    assert sizes[49] == pytest.approx(2.1, abs=0.05)
    assert sizes[50:62] == pytest.approx(sizes[:12])  # moments are dropped: the same kick again


def test_soda_decay_multiplies_after_the_step():
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    options = {"lr": 0.03, "betas": (0.9, 0.995), "eps": 0.0, "decay": 0.98, "reset_every": 50}
    optimizer = DecayingAdam([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert float(parameter.detach()) == pytest.approx((1 - 0.03 * 0.1 / 0.005**0.5) * 0.98)


def test_soda_is_deterministic_until_it_restarts(data, fit):
    def rows(seed, **options):
        return comparable_prompts(fit(SODA(**{**SMALL, **options}, seed=seed), data()))

    assert rows(1) == rows(2)
    assert rows(1, reinit_every=4) != rows(2, reinit_every=4)


def comparable_prompts(rows):
    return {i: (row.prompt_ids, row.discrete_loss) for i, row in rows.items()}


def test_soda_stops_on_the_step_that_its_check_passes(tiny, data, fit):
    """Between two evaluations, not at the next one."""
    text = tiny.decode(tiny.greedy(torch.tensor([[7, 8, 9, 10, 11]]), 1)[0].tolist())
    row = fit(SODA(**{**SMALL, "steps": 400, "eval_every": 400}), data(texts=[text]))["text_0"]
    assert row.exact
    assert 0 < row.steps < 400


# ---- GCG


def test_swaps_change_n_positions_to_tokens_of_the_top_k():
    columns = torch.tensor([0, 1, 2, 3])
    gradient = torch.randn(4, 9, generator=generator())
    top = (-gradient).topk(3).indices
    for n_replace in (1, 3):
        swaps = propose_swaps(columns, gradient, 3, 200, n_replace, generator(1))
        changed = swaps != columns
        assert (changed.sum(-1) <= n_replace).all()  # a pick may be the token that was there
        assert changed.any(0).all()
        for position in range(4):
            assert set(swaps[changed[:, position], position].tolist()) <= set(
                top[position].tolist()
            )


def test_gcg_never_lets_the_loss_rise(data, fit):
    curve = LossCurve()
    model = GCG(**{**SMALL, "steps": 25, "eval_every": 25}, search_width=6, topk=6)
    fit(model, data(batch_size=1, per_k=1, k=(5,)), callbacks=[curve])
    losses = [loss for (loss,) in curve.losses]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_gcg_original_rule_may_rise(data, fit):
    curve = LossCurve()
    options = {"search_width": 2, "topk": 8, "buffer_size": 0}
    model = GCG(**{**SMALL, "steps": 25, "eval_every": 25}, **options)
    fit(model, data(batch_size=1, per_k=1, k=(5,)), callbacks=[curve])
    losses = [loss for (loss,) in curve.losses]
    assert losses != sorted(losses, reverse=True)


def test_gcg_finds_the_best_of_all_prompts_of_two_tokens(tiny, data, fit):
    targets = data(batch_size=1, per_k=1, k=(6,), target_length=3)
    targets.load()
    target = targets.targets[0]
    plain = [i for i in tiny.prompt_token_ids.tolist() if i not in tiny.tokenizer.all_special_ids]
    prompts = torch.tensor(list(itertools.product(plain, repeat=2)))
    losses, _, _ = score_candidates(tiny, prompts[0], prompts, target)
    options = {"search_width": 64, "topk": 28, "buffer_size": 8, "init": "random"}
    model = GCG(prompt_length=2, steps=60, eval_every=60, n_replace=2, **options)
    row = fit(model, targets)[target.id]
    assert row.trace[-1].discrete_loss == pytest.approx(float(losses.min()), rel=1e-5)


def test_gcg_memory_bound_changes_nothing(data, fit):
    def rows(rows_per_pass):
        model = GCG(**SMALL, search_width=16, topk=8)
        found = fit(model, data(rows_per_pass=rows_per_pass))
        return {i: row.prompt_ids for i, row in found.items()}

    assert rows(1) == rows(3) == rows(16)


def test_gcg_prompts_round_trip_and_hold_no_special_tokens(tiny, data, fit):
    for row in fit(GCG(**SMALL, search_width=16, topk=8), data()).values():
        assert row.round_trips
        later = set(row.prompt_ids) - {tiny.encode(" x")[-1]}
        assert not later & set(tiny.tokenizer.all_special_ids)


# ---- PEZ


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_nearest_token_by_exhaustion(metric):
    matrix = torch.randn(20, 6, generator=generator())
    points = torch.randn(30, 6, generator=generator(1))
    if metric == "cosine":
        scores = torch.nn.functional.cosine_similarity(points[:, None], matrix[None], dim=-1)
    else:
        scores = -torch.cdist(points, matrix)
    assert torch.equal(nearness(points, matrix, metric).argmax(-1), scores.argmax(-1))


def test_pez_starts_at_tokens_and_reads_tokens(tiny, data, fit):
    row = fit(PEZ(**{**SMALL, "steps": 1}), data(batch_size=1, per_k=1))["k1_sample0"]
    first, last = row.trace[0], row.trace[-1]
    assert first.step == 0
    # The loss it descends is the loss of a discrete prompt: no soft-to-hard gap at step 0.
    curve = LossCurve()
    fit(PEZ(**{**SMALL, "steps": 1}), data(batch_size=1, per_k=1), callbacks=[curve])
    assert curve.losses[0][0] == pytest.approx(first.discrete_loss, rel=1e-6)
    assert last.step == 1


# ---- ADC


def test_keep_largest_keeps_the_counted_entries_and_sums_to_one():
    rows = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator())
    counts = torch.tensor([[1, 2, 8], [3, 1, 5]])
    sparse = keep_largest(rows, counts)
    assert torch.equal((sparse > 0).sum(-1), counts)
    torch.testing.assert_close(sparse.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(sparse.argmax(-1), rows.argmax(-1))


@pytest.mark.parametrize(
    ("sparsity", "length", "total"),
    [(1.0, 20, 20), (2.5, 20, 50), (1.05, 20, 25), (4.0, 6, 24), (1.5, 3, 6)],
)
def test_sparsity_counts(sparsity, length, total):
    counts = sparsity_counts(sparsity, length, generator())
    assert int(counts.sum()) == total
    assert int(counts.max() - counts.min()) <= 1


def test_adc_hardens_as_the_target_comes_right(data, fit):
    model = ADC(**{**SMALL, "steps": 150, "eval_every": 200}, restarts=1, lr=1.0, ema_rate=0.1)
    entries, wrong = [], []

    class Watch(LossCurve):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            slot = pl_module.active[0]
            entries.append(float(pl_module.diagnostics(slot)["nonzero"].mean()))
            wrong.append(float(slot.memory["wrong"]))

    fit(model, data(batch_size=1, per_k=1, k=(2,)), callbacks=[Watch()])
    assert min(wrong[5:]) < wrong[0]
    assert min(entries[5:]) < 31


def test_restarts_do_not_touch_each_other(data, fit):
    """One start alone takes the same path as the same start beside another."""
    first = []
    for restarts in (1, 2):
        model = ADC(**{**SMALL, "steps": 6, "eval_every": 6}, restarts=restarts, lr=1.0)
        start = torch.softmax(torch.randn(5, 31, generator=generator(), dtype=torch.float64), -1)
        model.initialise = lambda slot, m=model, s=start: m.Z[slot.index].copy_(s)
        path = []

        class Watch(LossCurve):
            def on_train_batch_end(self, trainer, pl_module, *_, keep=path):
                keep.append(pl_module.Z[0][0].detach().clone())

        fit(model, data(batch_size=1, per_k=1, k=(3,)), callbacks=[Watch()])
        first.append(path[0])  # before sparsification draws from the shared generator
    torch.testing.assert_close(*first)


def test_norm_gradient_scale_changes_gradients_only(tiny):
    embeds = tiny.embed(torch.tensor([[4, 5, 6]])).clone().requires_grad_()
    plain = tiny.target_logits(embeds, torch.tensor([[7]]))
    (before,) = torch.autograd.grad(plain.logsumexp(-1).sum(), embeds)
    with scaled_norm_gradients(tiny, 0.5):
        scaled = tiny.target_logits(embeds, torch.tensor([[7]]))
    assert torch.equal(plain, scaled)
    (after,) = torch.autograd.grad(scaled.logsumexp(-1).sum(), embeds)
    assert not torch.allclose(before, after)
    unscaled = tiny.target_logits(embeds, torch.tensor([[7]]))
    (again,) = torch.autograd.grad(unscaled.logsumexp(-1).sum(), embeds)
    torch.testing.assert_close(before, again)  # the hooks are gone


# ---- cost and budget


def test_cost_counts_every_token_once_forward_and_once_backward(data, fit):
    row = fit(DLMI(**SMALL, num_samples=3), data(batch_size=1))["k3_sample0"]
    row_tokens = 5 + 4 - 1
    assert row.backward_tokens == 3 * row.steps * row_tokens
    in_evaluations = row.forward_tokens - row.backward_tokens
    assert row_tokens <= in_evaluations <= len(row.trace) * (row_tokens + 3)


@pytest.mark.parametrize("teacher_forcing", [True, False])
def test_cost_is_what_the_lm_really_saw(data, fit, teacher_forcing):
    targets = data(batch_size=1, per_k=1, k=(3,), rows_per_pass=64)  # no pass to measure a row
    targets.load()
    seen = []
    embed_hook = targets.lm.model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape[0] * inputs[0].shape[1])
    )
    model = DLMI(**SMALL, num_samples=3, teacher_forcing=teacher_forcing)
    perplexity_and_round_trip = []
    model._report = lambda slot, reason: perplexity_and_round_trip.append(slot)
    fit(model, targets)
    embed_hook.remove()
    assert perplexity_and_round_trip[0].forward_tokens == sum(seen)


def test_token_budget_ends_a_target(data, fit):
    row_tokens, budget = 5 + 4 - 1, 1000
    rows = fit(DLMI(**{**SMALL, "steps": 10_000}, num_samples=3, token_budget=budget), data())
    for row in rows.values():
        if row.stop_reason == "budget":
            cost = row.forward_tokens + row.backward_tokens
            assert budget <= cost <= budget + (2 * 3 + 2) * row_tokens


def test_share_used_is_the_larger_of_the_two():
    slot = Slot.open(0, Target("t", (1,), "t"), 0, torch.device("cpu"))
    slot.step, slot.forward_tokens, slot.backward_tokens = 5, 30, 20
    assert Budget(10).share_used(slot) == 0.5
    assert Budget(10, 60).share_used(slot) == pytest.approx(50 / 60)
    assert Budget(10, 40).share_used(slot) == 1


# ---- settings that do not go together


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (DLMI, {"temperature": "fixed", "phi_init": "zero"}, "phi_init"),
        (DLMI, {"estimator": "reinmax"}, "reinmax"),
        (DLMI, {"estimator": "reinmax", "temperature": "fixed", "tau0": 0.5}, "reinmax"),
        (DLMI, {"next_token": "gumbel_softmax"}, "teacher_forcing"),
        (DLMI, {"rao_draws": 0}, "rao_draws"),
        (DLMI, {"token_budget": 0}, "token_budget"),
        (GBDA, {"tau": 0.0}, "`model.tau`"),
        (GBDA, {"tau_end": -1.0}, "tau_end"),
        (GBDA, {"final_samples": -1}, "final_samples"),
        (GBDA, {"estimator": "reinmax", "tau": 2.0, "tau_end": 0.5}, "reinmax"),
        (REINFORCE, {"baseline": "rloo", "num_samples": 1}, "num_samples.*rloo"),
        (REINFORCE, {"ema_decay": 1.0}, "ema_decay"),
        (SODA, {"decay": 1.5}, "decay"),
        (SODA, {"betas": (0.9, 1.0)}, "betas"),
        (SODA, {"reset_every": 0}, "reset_every"),
        (GCG, {"n_replace": 6, "prompt_length": 5}, "n_replace"),
        (GCG, {"buffer_size": -1}, "buffer_size"),
        (PEZ, {"weight_decay": -1.0}, "weight_decay"),
        (ADC, {"momentum": 1.0}, "momentum"),
        (ADC, {"restarts": 0}, "restarts"),
        (ADC, {"norm_gradient_scale": 0.0}, "norm_gradient_scale"),
    ],
)
def test_bad_settings_are_refused(method, settings, message):
    with pytest.raises(InputError, match=message):
        method(**settings)


def test_topk_beyond_the_vocabulary_is_refused(data, fit):
    with pytest.raises(InputError, match="`model.topk`.*at most 28.*got 29"):
        fit(GCG(**SMALL, topk=29), data())
