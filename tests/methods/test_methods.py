"""What is particular to each method, against truths worked out by hand or by exhaustion."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers.lm_calls import counted_calls
from helpers.methods import SMALL
from helpers.runs import LossCurve
from helpers.slots import drive, open_slot, random_ids
from lightning.pytorch import Callback

from dlmi import InputError, Inverter
from dlmi.estimators.sampling import gumbel_softmax
from dlmi.lm.norm_gradients import scaled_norm_gradients
from dlmi.methods import ADC, DLMI, GBDA, GCG, MAC, PEZ, REINFORCE, SODA
from dlmi.methods.adc import ADCState, count_larger_rows, keep_largest
from dlmi.methods.pez import nearness
from dlmi.methods.soda import DecayingAdam
from dlmi.run.budget import Budget
from dlmi.scoring.engine import Engine
from dlmi.scoring.losses import token_losses
from dlmi.scoring.passes import Cost, Pass, RelaxedNextToken, Scores
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

ONE = {"batch_size": 1, "per_k": 1, "k": (3,)}  # one target
ROW = 5 + 4 - 1  # tokens of a row: the prompt, and all of the target but its last


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- losses


def test_losses_by_hand():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator())
    target_ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    log_q = torch.log_softmax(logits, -1)
    others = logits.clone()
    pairs = [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4)]
    for row, position, token in pairs:
        others[row, position, token] = -math.inf
    by_hand = {
        "cross_entropy": lambda r, j, v: -log_q[r, j, v],
        "margin": lambda r, j, v: log_q[r, j].max() - log_q[r, j, v],
        "hinge": lambda r, j, v: (1 + others[r, j].max() - logits[r, j, v]).clamp_min(0),
        "mellowmax": lambda r, j, v: -logits[r, j, v],
    }
    for name, per_token in by_hand.items():
        expected = torch.stack([per_token(*pair) for pair in pairs])
        found = token_losses(name, logits, target_ids)
        torch.testing.assert_close(torch.cat([found[0], found[1, :1]]), expected)


def test_margin_is_zero_exactly_where_the_target_is_the_argmax():
    logits = torch.randn(4, 2, 6, generator=generator())
    best = logits.argmax(-1)
    assert (token_losses("margin", logits, best) == 0).all()
    assert (token_losses("margin", logits, (best + 1) % 6) > 0).all()


@pytest.mark.parametrize(
    "method",
    [
        *(DLMI(), GBDA(), REINFORCE(), SODA(), PEZ()),
        *(GCG(search_width=4, topk=4), ADC(restarts=2)),
    ],
)
def test_every_method_takes_every_loss(method, data, fit):
    """Each is another one from the first step on."""
    first = set()
    for loss in ("cross_entropy", "margin", "hinge"):
        chosen = dataclasses.replace(method, loss=loss)
        [row] = fit(Inverter(chosen, **{**SMALL, "steps": 1}), data(**ONE)).values()
        first.add(row.trace[-1].loss)
    assert len(first) == 3


# ---- DLMI and GBDA: what a gradient must obey


@pytest.mark.parametrize("temperature", ["fixed", "shared", "decoupled"])
@pytest.mark.parametrize("teacher_forcing", [True, False])
@pytest.mark.parametrize("estimator", ["gumbel_softmax", "straight_through"])
def test_every_cell_of_the_ablation_moves_what_it_learns(
    temperature, teacher_forcing, estimator, data, fit
):
    method = DLMI(
        tau0=1.0,
        num_samples=2,
        temperature=temperature,
        teacher_forcing=teacher_forcing,
        estimator=estimator,
    )
    moved = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for name, parameter in pl_module.named_parameters():
                moved[name] = bool((parameter.grad != 0).any())

    model = Inverter(method, **{**SMALL, "steps": 3})
    fit(model, data(**ONE), callbacks=[Watch()])
    learned = {"prompts.0.Z"} | ({"prompts.0.Phi"} if temperature != "fixed" else set())
    assert moved == dict.fromkeys(learned, True)
    if temperature != "fixed":
        assert model.prompts[0]["Phi"].shape == ((5,) if temperature == "decoupled" else ())


def test_gradient_reaches_through_sampled_next_tokens(tiny, monkeypatch):
    """By finite differences; a sample that is cut off from the graph gives another one."""
    engine = Engine(Vocabulary(tiny))
    target = Target.single("t", (5, 9, 11, 7), "")
    embeds = tiny.embed(random_ids(tiny, 1, 5)).clone().requires_grad_()
    direction = torch.randn(embeds.shape, generator=generator(), dtype=torch.float64)

    def loss(prompts):
        free_run = {"teacher_forcing": False, "next_token": RelaxedNextToken(1.0, seed=3)}
        return engine([Pass(prompts, target.examples, **free_run)])[0].losses[0]

    def slope():
        [gradient] = torch.autograd.grad(loss(embeds), embeds)
        return float((gradient * direction).sum())

    with torch.no_grad():
        # Norms and rotations of the tiny LM are float32 inside: no smaller step is of use.
        ends = [float(loss(embeds + step * direction)) for step in (1e-3, -1e-3)]
    expected = (ends[0] - ends[1]) / 2e-3
    assert slope() == pytest.approx(expected, rel=3e-3)
    monkeypatch.setattr(
        "dlmi.scoring.engine.gumbel_softmax", lambda *args: gumbel_softmax(*args).detach()
    )
    assert slope() != pytest.approx(expected, rel=0.05)


def test_annealing_reaches_its_end(data, fit):
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            [slot] = pl_module.active
            seen.append(float(pl_module.method.soft_prompt(slot, None).tau[0]))

    method = GBDA(tau=100.0, tau_end=0.01)
    fit(Inverter(method, **{**SMALL, "steps": 10}), data(**ONE), callbacks=[Watch()])
    expected = [100 * (0.01 / 100) ** (step / 10) for step in range(len(seen))]
    assert len(seen) >= 5
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))


def test_final_samples_only_ever_help_and_are_charged(data, fit):
    plain = fit(Inverter(GBDA(num_samples=2), **SMALL), data())
    with_samples = fit(Inverter(GBDA(num_samples=2, final_samples=40), **SMALL), data())
    assert all(with_samples[i].lcs >= plain[i].lcs for i in plain)
    assert any(with_samples[i].lcs > plain[i].lcs for i in plain)
    spent = [i for i, row in plain.items() if row.stop_reason == "budget"]
    assert spent
    for i in spent:
        # Each is read once, and decoded from its first wrong token on.
        extra = with_samples[i].forward_tokens - plain[i].forward_tokens
        assert 40 * ROW < extra <= 40 * (ROW + 3)


# ---- REINFORCE


def test_reinforce_sends_nothing_backward(data, fit):
    [row] = fit(Inverter(REINFORCE(num_samples=3), **SMALL), data(**ONE)).values()
    assert row.backward_tokens == 0
    in_steps = 3 * row.steps * ROW
    assert in_steps + 8 <= row.forward_tokens <= in_steps + len(row.trace) * (ROW + 3)


# ---- SODA


def soda_updates(parameter, steps, **options):
    """Sizes of updates by a gradient that is always 1."""
    usual = {"lr": 1.0, "betas": (0.9, 0.995), "eps": 1e-8, "decay": 1.0, "reset_every": 50}
    optimizer = DecayingAdam([parameter], **{**usual, **options})
    sizes = []
    for _ in range(steps):
        before = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        sizes.append(float(before - parameter.detach()))
    return sizes


def test_soda_updates_follow_the_trace_worked_out_by_hand():
    """First step 1.41 lr; without decay a constant gradient peaks near 2.97 lr at step 12."""
    sizes = soda_updates(torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)), 62)
    assert sizes[0] == pytest.approx(0.1 / 0.005**0.5, rel=1e-6)  # 1.414
    assert max(sizes[:50]) == pytest.approx(2.97, abs=0.01)
    assert sizes.index(max(sizes[:50])) + 1 == 12
    assert sizes[49] == pytest.approx(2.1, abs=0.05)
    assert sizes[50:62] == pytest.approx(sizes[:12])  # moments are dropped: the same kick again


def test_soda_decay_multiplies_after_the_step():
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    soda_updates(parameter, 1, lr=0.03, eps=0.0, decay=0.98)
    assert float(parameter.detach()) == pytest.approx((1 - 0.03 * 0.1 / 0.005**0.5) * 0.98)


def test_soda_is_deterministic_until_it_restarts(data, fit):
    def paths(seed, **options):
        rows = fit(Inverter(SODA(**options), **SMALL, seed=seed), data())
        return {i: [point.discrete_loss for point in row.trace] for i, row in rows.items()}

    assert paths(1) == paths(2)
    assert paths(1, reinit_every=4) != paths(2, reinit_every=4)


def test_soda_stops_on_the_step_that_its_check_passes(tiny, data, fit):
    """Between two evaluations, not at the next one."""
    text = tiny.decode(tiny.greedy(torch.tensor([[7, 8, 9, 10, 11]]), 1)[0].tolist())
    model = Inverter(SODA(), **{**SMALL, "steps": 400, "eval_every": 400})
    row = fit(model, data(texts=[text]))["text_0"]
    assert row.exact
    assert 0 < row.steps < 400


# ---- GCG


@pytest.mark.parametrize("kind", [GCG, MAC])
def test_swaps_change_n_positions_to_tokens_that_the_gradient_likes(kind, tiny):
    slot = open_slot(Vocabulary(tiny), Target.single("t", (5, 9), ""), 4)
    x = torch.tensor([10, 11, 12, 13])
    likely_ids = 10 + torch.stack(
        [torch.randperm(15, generator=generator(i))[:3] for i in range(4)]
    )
    for n_replace in (1, 3):
        method = kind(search_width=200, n_replace=n_replace, filter_ids=False)
        swaps = method.candidates(slot, x, likely_ids)
        changed = swaps != x
        assert (changed.sum(-1) <= n_replace).all()  # a pick may be the token that was there
        assert int(changed.sum(-1).max()) == n_replace
        for position in range(4):
            found = set(swaps[changed[:, position], position].tolist())
            assert found == set(likely_ids[position].tolist()) - {int(x[position])}
        if kind is MAC:  # x itself is no candidate, and no position has more of them than another
            assert changed.any(-1).all()
            counts = method.positions(slot).flatten().bincount(minlength=4)
            assert counts.tolist() == [50 * n_replace] * 4


def test_few_candidates_of_mac_reach_all_positions(tiny):
    slot = open_slot(Vocabulary(tiny), Target.single("t", (5, 9), ""), 6)
    method = MAC(search_width=2, n_replace=2)
    rows = torch.cat([method.positions(slot) for _ in range(30)])
    assert set(rows.flatten().tolist()) == set(range(6))
    assert all(len(set(row)) == 2 for row in rows.tolist())


def gcg_losses(data, fit, **options):
    curve = LossCurve()
    model = Inverter(GCG(**options), **{**SMALL, "steps": 25, "eval_every": 25})
    fit(model, data(batch_size=1, per_k=1, k=(5,)), callbacks=[curve])
    return [loss for (loss,) in curve.losses]


def test_gcg_never_lets_the_loss_rise(data, fit):
    losses = gcg_losses(data, fit, search_width=6, topk=6)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_gcg_original_rule_may_rise(data, fit):
    losses = gcg_losses(data, fit, search_width=2, topk=8, buffer_size=0)
    assert losses != sorted(losses, reverse=True)


def test_gcg_finds_the_best_of_all_prompts_of_two_tokens(tiny, data, fit):
    targets = data(batch_size=1, per_k=1, k=(6,), length=3)
    targets.load()
    [target] = targets.targets
    plain = [i for i in tiny.prompt_token_ids.tolist() if i not in tiny.tokenizer.all_special_ids]
    prompts = torch.tensor(list(itertools.product(plain, repeat=2)))
    [scores] = Engine(Vocabulary(tiny))([Pass(prompts, target.examples)])
    method = GCG(search_width=64, topk=28, buffer_size=8, first_prompt="random", n_replace=2)
    row = fit(Inverter(method, prompt_length=2, steps=60, eval_every=60), targets)[target.id]
    assert row.trace[-1].discrete_loss == pytest.approx(float(scores.losses.min()), rel=1e-5)


def test_gcg_prompts_round_trip_and_hold_no_special_tokens(tiny, data, fit):
    for row in fit(Inverter(GCG(search_width=16, topk=8), **SMALL), data()).values():
        assert row.round_trips
        later = set(row.prompt_ids) - {tiny.encode(" x")[-1]}
        assert not later & set(tiny.tokenizer.all_special_ids)


def test_topk_and_n_replace_must_fit(data, fit):
    with pytest.raises(InputError, match="`model.method.topk`.*at most 28.*got 29"):
        fit(Inverter(GCG(topk=29), **SMALL), data())
    with pytest.raises(InputError, match=r"n_replace.*`model.prompt_length` \(5\), but got 6"):
        fit(Inverter(GCG(topk=8, n_replace=6), **SMALL), data())


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


def test_pez_starts_at_tokens_and_reads_tokens(data, fit):
    """The loss it descends is the loss of a discrete prompt: no soft-to-hard gap at step 0."""
    [row] = fit(Inverter(PEZ(), **{**SMALL, "steps": 1}), data(**ONE)).values()
    first, last = row.trace
    assert (first.step, last.step) == (0, 1)
    assert last.loss == pytest.approx(first.discrete_loss, rel=1e-6)


# ---- ADC


@pytest.mark.parametrize("count", [1, 3, 7])
def test_keep_largest_keeps_the_counted_entries_and_sums_to_one(count):
    rows = torch.randn(3, 8, dtype=torch.float64, generator=generator())
    is_larger = torch.tensor([False, True, False])
    sparse = keep_largest(rows, count, is_larger)
    assert torch.equal((sparse > 0).sum(-1), count + is_larger.long())
    torch.testing.assert_close(sparse.sum(-1), torch.ones(3, dtype=torch.float64))
    for row, kept in zip(rows, sparse > 0, strict=True):
        assert row[kept].min() > row[~kept].max() if not kept.all() else count == 7


@pytest.mark.parametrize(
    ("sparsity", "length", "larger"),
    [(1.0, 20, 5), (2.5, 20, 10), (2.49, 20, 9), (1.05, 20, 5), (4.0, 6, 5), (1.5, 3, 5)],
)
def test_a_share_of_the_rows_keeps_one_entry_more(sparsity, length, larger):
    """The fraction is rounded down, but there are at least five."""
    assert count_larger_rows(sparsity, length) == larger


def test_adc_hardens_as_the_target_comes_right(data, fit):
    """A step reads rows with 2^w entries, where w is the average of wrong tokens so far."""
    entries, wrong = [], []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            [slot] = pl_module.active
            entries.append(int((slot.params["Z"] > 0).sum()))
            wrong.append(float(slot.state.wrong))

    method = ADC(restarts=1, lr=1.0, ema_rate=0.1)
    model = Inverter(method, **{**SMALL, "steps": 150, "eval_every": 200})
    fit(model, data(batch_size=1, per_k=1, k=(2,)), callbacks=[Watch()])
    assert len(entries) > 20
    for count, before in zip(entries[1:], wrong, strict=False):
        sparsity = min(2.0**before, 31 / 2)
        assert count == 5 * int(sparsity) + min(count_larger_rows(sparsity, 5), 5)
    assert entries[0] == 5 * 31  # dense at first
    assert min(wrong) < wrong[0]
    assert min(entries) < entries[1]  # as sparse as there were wrong tokens at first


def test_adc_scores_no_prompt_twice(tiny):
    """Second best tokens take the place of the best ones, one position at a time."""
    method = ADC(restarts=2)
    slot = open_slot(Vocabulary(tiny), Target.single("t", (5, 9), ""), 3, method)
    with torch.no_grad():
        state = method.init(slot)
        slot.params["Z"].copy_(slot.params["Z"][:1].clone().expand(2, -1, -1))
    first, second = slot.tokens.ids(slot.params["Z"][0].topk(2).indices).T
    scored = []

    def answer(asked):
        if not asked.prompts.is_floating_point():
            scored.extend(asked.prompts.tolist())
        losses = asked.prompts.flatten(1).sum(-1).double()
        outputs = torch.zeros(asked.count, 2).long()
        return Scores(losses, outputs, beside=asked.beside)

    for slot.step in range(3):
        state.wrong = None  # the rows stay as they are
        _, state = drive(method.step(slot, state), answer)
    one_changed = torch.where(torch.eye(3, dtype=torch.bool), second, first).tolist()
    assert scored == [first.tolist(), *one_changed]
    assert len(state.seen) == 4
    best = min(scored, key=sum)
    assert state.best_ids.tolist() == best


START = torch.softmax(torch.randn(5, 31, generator=generator(), dtype=torch.float64), -1)


@dataclasses.dataclass(frozen=True)
class FromStart(ADC):
    """All restarts begin alike."""

    def init(self, slot):
        slot.params["Z"].copy_(START.expand(self.restarts, -1, -1))
        return ADCState(slot.tokens.ids(START.argmax(-1)))


def test_restarts_do_not_touch_each_other(data, fit):
    """One start alone takes the same step as the same start beside another."""
    first = []
    for restarts in (1, 2):
        path = []

        class Watch(Callback):
            def on_train_batch_end(self, trainer, pl_module, *_, keep=path):
                keep.append(pl_module.prompts[0]["Z"][0].detach().clone())

        model = Inverter(FromStart(restarts=restarts, lr=1.0), **{**SMALL, "steps": 6})
        fit(model, data(**ONE), callbacks=[Watch()])
        first.append(path[0])  # before sparsification draws from the slot's generator
    torch.testing.assert_close(*first)
    assert not torch.allclose(first[0], START)


def test_norm_gradient_scale_changes_gradients_only(tiny):
    embeds = tiny.embed(torch.tensor([[4, 5, 6]])).clone().requires_grad_()

    def gradient(logits):
        return torch.autograd.grad(logits.logsumexp(-1).sum(), embeds)[0]

    plain = tiny.target_logits(embeds, torch.tensor([[7]]))
    before = gradient(plain)
    with scaled_norm_gradients(tiny, 0.5):
        scaled = tiny.target_logits(embeds, torch.tensor([[7]]))
    assert torch.equal(plain, scaled)
    assert not torch.allclose(before, gradient(scaled))
    again = gradient(tiny.target_logits(embeds, torch.tensor([[7]])))
    torch.testing.assert_close(before, again)  # the hooks are gone


def test_the_runs_scale_of_norm_gradients_takes_the_place_of_the_methods(data, fit):
    def path(method, **options):
        [row] = fit(Inverter(method, **SMALL, **options), data(**ONE)).values()
        return [point.discrete_loss for point in row.trace]

    scaled = path(ADC(restarts=1, norm_gradient_scale=0.5))
    assert path(ADC(restarts=1), norm_gradient_scale=0.5) == scaled
    assert path(ADC(restarts=1, norm_gradient_scale=0.5), norm_gradient_scale=1.0) != scaled


# ---- cost and budget


@pytest.mark.parametrize("prompt_bos", [False, True])
@pytest.mark.parametrize(
    "method",
    [
        DLMI(num_samples=3),
        DLMI(num_samples=3, teacher_forcing=False),
        SODA(),
        REINFORCE(num_samples=3),
        GCG(search_width=8, topk=4),
    ],
)
def test_a_target_costs_what_the_lm_saw(method, prompt_bos, data, fit, monkeypatch):
    """All of a target's run: its start, its steps and its evaluations; its row is not charged."""
    targets = data(**ONE, rows_per_pass=64)  # a number: no pass to measure a row
    targets.load()
    model, seen = Inverter(method, **SMALL, prompt_bos=prompt_bos), []

    def report(slot, reason):
        seen.append((slot.cost, Cost(sum(calls.tokens), sum(calls.backward))))

    monkeypatch.setattr(model, "_report", report)
    assert targets.lm.can_pack  # what finds that out reads tokens too
    with counted_calls(targets.lm) as calls:
        fit(model, targets)
    [(cost, saw)] = seen
    assert cost == saw


def test_share_used_is_the_larger_of_the_two(tiny):
    slot = open_slot(Vocabulary(tiny), Target.single("t", (5,), ""))
    slot.step, slot.cost = 5, Cost(30, 20)
    assert Budget(10).share_used(slot) == 0.5
    assert Budget(10, 60).share_used(slot) == pytest.approx(50 / 60)
    assert Budget(10, 40).share_used(slot) == 1


def test_a_slot_has_a_seed_for_each_step_and_purpose(tiny):
    slot = open_slot(Vocabulary(tiny), Target.single("t", (5,), ""))
    seeds = {slot.seed(), slot.seed("next token")}
    assert slot.seed() in seeds
    slot.step = 1
    seeds |= {slot.seed(), slot.seed("next token")}
    assert len(seeds) == 4


# ---- settings that do not go together


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (DLMI, {"estimator": "reinmax"}, "reinmax"),
        (DLMI, {"estimator": "reinmax", "temperature": "fixed", "tau0": 0.5}, "reinmax"),
        (DLMI, {"next_token_tau": 1.0}, "teacher_forcing"),
        (DLMI, {"next_token_tau": 0.0, "teacher_forcing": False}, "next_token_tau"),
        (DLMI, {"rao_draws": 0}, "rao_draws"),
        (GBDA, {"tau": 0.0}, "`model.method.tau`"),
        (GBDA, {"tau_end": -1.0}, "tau_end"),
        (GBDA, {"final_samples": -1}, "final_samples"),
        (GBDA, {"estimator": "reinmax", "tau": 2.0, "tau_end": 0.5}, "reinmax"),
        (REINFORCE, {"baseline": "rloo", "num_samples": 1}, "num_samples.*rloo"),
        (REINFORCE, {"ema_decay": 1.0}, "ema_decay"),
        (SODA, {"decay": 1.5}, "decay"),
        (SODA, {"betas": (0.9, 1.0)}, "betas"),
        (SODA, {"reset_every": 0}, "reset_every"),
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


@pytest.mark.parametrize(
    "settings",
    [{"token_budget": 0}, {"prompt_length": 0}, {"steps": -1}, {"norm_gradient_scale": 0.0}],
)
def test_bad_settings_of_a_run_are_refused(settings):
    [name] = settings
    with pytest.raises(InputError, match=f"`model.{name}`"):
        Inverter(DLMI(), **settings)
