"""RandomSearch, MAC, AutoPrompt, ARCA and PGD against what they are by definition."""

import math

import pytest
import torch
from helpers.lm_calls import counted_calls
from helpers.slots import begin, drive, open_slot, random_ids

from dlmi import InputError
from dlmi.methods import ARCA, MAC, PGD, AutoPrompt, RandomSearch, pgd
from dlmi.methods.arca import ARCAState
from dlmi.methods.candidates import PromptState
from dlmi.methods.gcg import GCGState
from dlmi.methods.pgd import harden, onto_simplex
from dlmi.methods.random_search import RandomSearchState
from dlmi.scoring.engine import Engine
from dlmi.scoring.losses import row_losses
from dlmi.scoring.passes import NO_SWAP, Pass, Scores, Swaps, advance
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

TARGET = Target.single("t", (5, 9, 11, 7), "")
X = torch.tensor([15, 16, 17, 18])


@pytest.fixture
def vocabulary(tiny):
    return Vocabulary(tiny)


def loss_gradients(lm, ids):
    """The gradient of the target's cross-entropy with respect to embeddings, (N, d), by hand."""
    embeds = lm.embed(ids).double().requires_grad_()
    wanted = torch.tensor(TARGET.ids)
    whole = torch.cat([embeds, lm.embed(wanted[:-1]).double()]).to(lm.dtype)[None]
    logits = lm.model(inputs_embeds=whole).logits[0, len(ids) - 1 :]
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    return torch.autograd.grad(loss, embeds)[0]


# ---- momentum and averages of gradients


def test_what_is_carried_is_an_average_of_normalised_gradients(tiny, vocabulary):
    engine, slot = Engine(vocabulary), open_slot(vocabulary, TARGET, 4)
    carried, expected = None, None
    for seed in range(3):
        ids = random_ids(tiny, 4, seed=seed)
        swaps = Swaps(slot.tokens, 6, momentum=0.7, carried=carried)
        [scores] = engine([Pass(ids[None], slot.examples, swaps=swaps)])
        carried = scores.carried
        gradient = loss_gradients(tiny, ids)
        by_one_hot = gradient @ vocabulary.matrix.double().T
        gradient /= by_one_hot.norm(dim=-1, keepdim=True)
        expected = gradient if expected is None else 0.7 * expected + 0.3 * gradient
        torch.testing.assert_close(carried.double(), expected, rtol=1e-4, atol=1e-6)
        promises = -(expected.to(vocabulary.matrix.dtype) @ vocabulary.matrix.T)
        best = vocabulary.ids(promises.topk(6, dim=-1).indices)
        assert scores.swap_ids.sort(-1).values.tolist() == best.sort(-1).values.tolist()


def test_no_gradient_leaves_the_engine_without_momentum(vocabulary):
    slot = open_slot(vocabulary, TARGET, 4)
    [scores] = Engine(vocabulary)([Pass(X[None], slot.examples, swaps=Swaps(slot.tokens, 3))])
    assert scores.carried is None


def test_swaps_of_several_prompts_follow_their_mean_gradient(tiny, vocabulary):
    """Beside a pass for one prompt, which is read in another way."""
    engine, slot = Engine(vocabulary), open_slot(vocabulary, TARGET, 4)
    ids = random_ids(tiny, 5, 4, seed=3)
    swaps = Swaps(slot.tokens, 4)
    asked = [Pass(ids, slot.examples, swaps=swaps), Pass(ids[:1], slot.examples, swaps=swaps)]
    many, single = engine(asked)
    gradients = torch.stack([loss_gradients(tiny, own) for own in ids])
    for scores, gradient in ((many, gradients.mean(0)), (single, gradients[0])):
        promises = -(gradient.to(vocabulary.matrix.dtype) @ vocabulary.matrix.T)
        best = vocabulary.ids(promises.topk(4, dim=-1).indices)
        assert scores.swap_ids.sort(-1).values.tolist() == best.sort(-1).values.tolist()
    assert many.losses.shape == (5,)
    assert many.losses[0] == pytest.approx(float(single.losses[0]), rel=1e-5)


def test_mac_takes_the_best_candidate_though_it_is_worse(vocabulary):
    method = MAC(search_width=2, topk=2, filter_ids=False, momentum=0.9)
    slot = open_slot(vocabulary, TARGET, 4)
    before, after = torch.ones(4, 8), torch.full((4, 8), 2.0)
    steps = method.step(slot, GCGState(X, before))
    asked = next(steps)
    assert asked.swaps.carried is before
    assert asked.swaps.momentum == 0.9
    asked = steps.send(Scores(torch.ones(1), torch.zeros(1, 4).long(), X[:, None] + 1, after))
    with pytest.raises(StopIteration) as end:
        steps.send(Scores(torch.tensor([4.0, 3.0]), torch.zeros(2, 4).long()))
    _, state = end.value.value
    assert torch.equal(state.prompt_ids, asked.prompts[1])
    assert state.carried is after


# ---- ARCA and AutoPrompt


def test_arca_sweeps_over_positions_and_reads_what_is_fixed_once(vocabulary):
    method, slot = ARCA(num_candidates=3), open_slot(vocabulary, TARGET, 4)
    state = ARCAState(X, X)
    for slot.step in range(6):
        position = slot.step % 4
        steps = method.step(slot, state)
        asked = next(steps)
        assert asked.prompts.shape == (3, 4 - position)
        assert (asked.prompts[:, 1:] == state.prompt_ids[position + 1 :]).all()
        [example] = asked.examples
        assert example.context.ids(asked.prompts[0].tolist())[:position] == tuple(
            state.prompt_ids[:position].tolist()
        )
        swap_ids = torch.tensor([20, 21, NO_SWAP]).repeat(4 - position, 1)
        asked = steps.send(Scores(torch.ones(3), torch.zeros(3, 4).long(), swap_ids))
        assert asked.prompts[:, 0].tolist() == [20, 21]
        losses = torch.tensor([5.0, 4.0 - slot.step]) if slot.step < 3 else torch.tensor([7.0, 8.0])
        with pytest.raises(StopIteration) as end:
            steps.send(Scores(losses, torch.zeros(2, 4).long()))
        step, state = end.value.value
        assert int(state.prompt_ids[position]) == (21 if slot.step < 3 else 20)
        assert step.loss == losses.min()
    assert state.best_loss == 2.0  # of step 2; later ones were taken though they were worse
    assert state.best_ids.tolist() == [21, 21, 21, 18]
    assert state.prompt_ids.tolist() == [20, 20, 21, 20]
    assert method.prompt_ids(slot, state).tolist() == [21, 21, 21, 18]


def test_a_step_of_arca_costs_what_the_lm_reads(tiny, vocabulary):
    method, slot = ARCA(num_candidates=3), open_slot(vocabulary, TARGET, 4)
    engine = Engine(vocabulary)
    begin(method, slot, engine)
    assert tiny.can_pack  # what finds that out reads tokens too
    for slot.step in range(5):
        account = slot.account(math.inf)
        with counted_calls(tiny) as calls:
            [outcome] = advance([method.step(slot, slot.state)], engine, [account])
        _, slot.state = outcome.value
        position = slot.step % 4
        rows = 4 - position + len(TARGET.ids) - 1
        assert account.cost.backward == 3 * rows
        assert account.cost.forward == sum(calls.tokens)


@pytest.mark.parametrize(("losses", "moves"), [([3.0, 1.5], True), ([3.0, 2.0], False)])
def test_autoprompt_tries_one_position_and_moves_only_if_that_is_better(vocabulary, losses, moves):
    method, slot = AutoPrompt(topk=2), open_slot(vocabulary, TARGET, 4)
    steps = method.step(slot, PromptState(X))
    asked = next(steps)
    [[position, own_id]] = asked.swaps.barred.tolist()
    assert own_id == X[position]
    swap_ids = torch.tensor([20, 21]).repeat(4, 1)
    asked = steps.send(Scores(torch.tensor([2.0]), torch.zeros(1, 4).long(), swap_ids))
    assert asked.prompts[:, position].tolist() == [20, 21]
    assert ((asked.prompts != X).sum(-1) == 1).all()
    with pytest.raises(StopIteration) as end:
        steps.send(Scores(torch.tensor(losses), torch.zeros(2, 4).long()))
    step, state = end.value.value
    assert torch.equal(state.prompt_ids, asked.prompts[1] if moves else X)
    assert step.loss == 2.0


# ---- RandomSearch


def random_search_step(vocabulary, state, outputs, losses):
    method = RandomSearch(width=len(outputs) - (state.lcs < 0))
    steps = method.step(open_slot(vocabulary, TARGET, 4), state)
    asked = next(steps)
    assert not asked.teacher_forcing
    assert not asked.has_gradient
    with pytest.raises(StopIteration) as end:
        steps.send(Scores(torch.tensor(losses), torch.tensor(outputs)))
    return asked.prompts, *end.value.value


def test_random_search_keeps_the_longest_subsequence_then_the_likeliest(vocabulary):
    outputs = [[0, 0, 0, 0], [5, 0, 11, 0], [9, 11, 0, 0], [5, 0, 0, 0]]
    ids, step, state = random_search_step(
        vocabulary, RandomSearchState(X), outputs, [0.1, 3.0, 2.0, 0.5]
    )
    assert torch.equal(ids[0], X)  # which has not been decoded before
    assert torch.equal(state.prompt_ids, ids[2])
    assert (state.lcs, state.loss, float(step.loss)) == (0.5, 2.0, 2.0)
    ids, step, kept = random_search_step(
        vocabulary, state, [[5, 9, 0, 0], [5, 0, 0, 0]], [2.5, 0.1]
    )
    assert ids.shape == (2, 4)
    assert kept is state
    assert step.found_ids is None
    ids, step, state = random_search_step(vocabulary, state, [list(TARGET.ids)], [9.0])
    assert torch.equal(step.found_ids, ids[0])
    assert torch.equal(state.prompt_ids, ids[0])


def test_random_search_finds_what_enumeration_finds(tiny, tmp_path):
    """Of a vocabulary of three tokens and prompts of two, all are seen soon."""
    path = tmp_path / "tokens.txt"
    path.write_text("w1\nw2\nw3\n")
    vocabulary = Vocabulary(tiny, [str(path)])
    prompts = torch.cartesian_prod(vocabulary.token_ids, vocabulary.token_ids)
    said = tiny.greedy(prompts, 4)
    target = Target.single("t", tuple(said[5].tolist()), "")
    engine, slot = Engine(vocabulary), open_slot(vocabulary, target, 2)
    method = RandomSearch(width=16)
    begin(method, slot, engine)
    for _ in range(6):
        _, slot.state = drive(method.step(slot, slot.state), lambda asked: engine([asked])[0])
    assert slot.state.lcs == 1.0
    assert tiny.greedy(slot.state.prompt_ids[None], 4)[0].tolist() == list(target.ids)


# ---- PGD


def nearest_by_bisection(row):
    """The projection onto the simplex from its optimality condition: sum(max(row - t, 0)) = 1.

    A row whose positive entries sum to less than 1 is scaled instead.
    """
    positive = [min(max(value, 0), 1) for value in row]
    if sum(positive) < 1:
        return [value / sum(positive) for value in positive]
    low, high = min(row) - 1, max(row)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(value - middle, 0) for value in row) > 1:
            low = middle
        else:
            high = middle
    return [max(value - low, 0) for value in row]


def test_projection_onto_the_simplex():
    rows = torch.randn(20, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[:5] *= 0.1
    nearest = [nearest_by_bisection(row) for row in rows.tolist()]
    expected = torch.tensor(nearest, dtype=torch.float64)
    torch.testing.assert_close(onto_simplex(rows), expected, rtol=0, atol=1e-12)
    rows[:, 2] = -torch.inf
    barred = onto_simplex(rows)
    assert (barred[:, 2] == 0).all()
    torch.testing.assert_close(barred.sum(-1), torch.ones(20, dtype=torch.float64))
    nothing = onto_simplex(torch.tensor([-1.0, 0.0, -torch.inf]))
    assert nothing.tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_hardened_rows_lie_on_the_simplex_and_far_enough_from_its_centre(share):
    """In the face of their non-zero entries; a row that was far enough stays as it is."""
    rng = torch.Generator().manual_seed(1)
    rows = onto_simplex(torch.randn(50, 7, dtype=torch.float64, generator=rng))
    hard = harden(rows, share)
    torch.testing.assert_close(hard.sum(-1), torch.ones(50, dtype=torch.float64))
    assert (hard >= 0).all()
    assert (hard[rows == 0] == 0).all()
    count = (rows > 0).sum(-1).double()
    squared = hard.square().sum(-1) - 1 / count
    was_near = rows.square().sum(-1) - 1 / count < share * (1 - 1 / count) - 1e-12
    inside = was_near & ((hard > 0).sum(-1) == count)
    torch.testing.assert_close(squared[inside], (share * (1 - 1 / count))[inside])
    assert torch.equal(hard[~was_near], rows[~was_near])
    assert torch.equal(hard.argmax(-1), rows.argmax(-1))


def test_pgd_goes_back_to_the_best_when_nothing_helps(vocabulary):
    method = PGD(patience=2)
    slot = open_slot(vocabulary, TARGET, 4, method)
    slot.reset_moments = lambda: pytest.fail("Adam keeps its moments")
    with torch.no_grad():
        state = method.init(slot)
    rows = slot.params["Z"]
    torch.testing.assert_close(rows.sum(-1), torch.ones(4, dtype=torch.float64))
    assert 1.9 < float(rows.detach().max() * len(vocabulary)) < 2.5  # of U(0, 1), whose mean is 1/2
    best = vocabulary.ids(rows.argmax(-1)).tolist()
    for slot.step, loss in enumerate([3.0, 4.0, 5.0]):
        losses = iter([torch.tensor([loss]), None])

        def answer(asked, losses=losses):
            given = next(losses)
            if given is None:
                given = asked.prompts.sum((-1, -2)) * 1000
            return Scores(given, torch.zeros(1, 4).long())

        step, state = drive(method.step(slot, state), answer)
        assert state.gap == pytest.approx(1 - float(step.loss.detach()) / loss)
        [gradient] = torch.autograd.grad(step.loss, rows)
        norms = torch.linalg.vector_norm(gradient, dim=-1)
        torch.testing.assert_close(norms, torch.full((4,), 20.0, dtype=torch.float64))  # clipped
        along = (gradient * rows).sum(-1)  # to scale a row changes nothing
        torch.testing.assert_close(along, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-9)
        if slot.step < 2:
            with torch.no_grad():
                rows -= 0.01 * torch.randn(4, len(vocabulary), dtype=torch.float64)
    assert torch.equal(rows.sort(-1).values[:, -2:], torch.tensor([[0.0, 1.0]] * 4).double())
    assert vocabulary.ids(rows.argmax(-1)).tolist() == best == state.best_ids.tolist()
    assert (state.best_loss, state.waited) == (3.0, 0)


def test_rate_of_pgd_is_constant_and_then_rises_along_a_cosine():
    rates = [PGD()._rate(step) for step in (0, 99, 100, 130, 159, 160)]
    assert rates[:3] == pytest.approx([0.11] * 3)
    assert rates[3] == pytest.approx((0.11 + 0.325) / 2)
    assert 0.324 < rates[4] < 0.325
    assert rates[5] == pytest.approx(0.11)


@pytest.mark.parametrize("gap", [0.05, 1.0])
def test_hardening_of_pgd_follows_rate_and_gap(gap, vocabulary, monkeypatch):
    shares = []
    monkeypatch.setattr(pgd, "harden", lambda rows, share: shares.append(share) or rows)
    method = PGD(entropy_factor=0.8, entropy_steps=100)
    slot = open_slot(vocabulary, TARGET, 4, method)
    with torch.no_grad():
        state = method.init(slot)
    state.before, state.gap = slot.params["Z"].detach().clone(), gap
    for slot.step in (1, 51, 130):
        method._project(slot, state)
    low, middle = 0.11 / 0.325, (0.11 / 0.325 + 1) / 2
    expected = [0.0, 0.4 * low, 0.8 * middle]
    assert shares == pytest.approx([pgd.weakened(gap) * share for share in expected])


# ---- settings


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MAC, {"momentum": 0.0}),
        (MAC, {"momentum": 1.0}),
        (MAC, {"topk": 0}),
        (AutoPrompt, {"topk": 0}),
        (ARCA, {"num_candidates": 0}),
        (RandomSearch, {"width": 0}),
        (PGD, {"entropy_factor": 1.5}),
        (PGD, {"clip": 0.0}),
        (PGD, {"patience": 0}),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, options):
    [name] = options
    with pytest.raises(InputError, match=name):
        kind(**options)


def test_mellowmax_is_log_mean_exp_and_does_not_overflow():
    losses = torch.tensor([1.0, 2.0, 400.0, 399.0, -300.0], requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1, 2])
    weights = torch.tensor([1.0, 3.0, 1.0, 1.0, 2.0])
    found = row_losses("mellowmax", losses, weights, rows, 3)
    first = math.log((math.e + 3 * math.e**2) / 4)
    second = 400 + math.log((1 + math.exp(-1)) / 2)
    torch.testing.assert_close(found, torch.tensor([first, second, -300.0]))
    [gradient] = torch.autograd.grad(found.sum(), losses)
    torch.testing.assert_close(gradient[:2].sum(), torch.tensor(1.0))
    assert gradient[2] / gradient[3] == pytest.approx(math.e, rel=1e-4)
