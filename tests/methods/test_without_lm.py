"""Methods driven by hand with made-up scores: the LM is never asked."""

import itertools

import pytest
import torch
from helpers.lm_calls import counted_calls
from helpers.slots import drive, open_slot

from dlmi.estimators.score_function import sample_log_probs
from dlmi.methods import DLMI, GCG, REINFORCE, SwapSearch
from dlmi.methods.gcg import GCGState
from dlmi.methods.reinforce import REINFORCEState
from dlmi.scoring.passes import NO_SWAP, Scores
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

TARGET = Target.single("t", (5, 9, 11, 7, 13, 6), "")
X = torch.tensor([15, 16, 17, 18])


@pytest.fixture
def vocabulary(tiny):
    """Whoever asks the LM here fails."""
    with counted_calls(tiny) as calls:
        yield Vocabulary(tiny)
    assert calls.tokens == []


def outputs(count, right=0):
    """What is said after prompts, (C, M): so many tokens right, then wrong ones."""
    ids = torch.zeros(count, len(TARGET.ids), dtype=torch.long)
    ids[:, :right] = torch.tensor(TARGET.ids[:right])
    return ids


# ---- GCG


def gcg_step(method, vocabulary, losses, right=0):
    """The gradient likes tokens 20 to 22; its candidates have these losses, x has 2."""
    slot = open_slot(vocabulary, TARGET, 4)
    steps = method.step(slot, GCGState(X))
    asked = next(steps)
    assert asked.swaps.count == 3
    assert asked.like_ids is None
    assert torch.equal(asked.prompts, X[None])
    assert asked.examples == slot.examples
    swap_ids = torch.tensor([20, 21, 22]).repeat(4, 1)
    asked = steps.send(Scores(torch.tensor([2.0]), outputs(1), swap_ids))
    assert torch.equal(asked.like_ids, X)
    assert asked.swaps is None
    with pytest.raises(StopIteration) as end:
        steps.send(Scores(torch.tensor(losses), outputs(len(losses), right)))
    return asked.prompts, *end.value.value


def test_gcg_asks_for_a_gradient_then_for_swaps_and_takes_the_best(vocabulary):
    method = GCG(search_width=5, topk=3, filter_ids=False)
    ids, step, state = gcg_step(method, vocabulary, [3.0, 1.5, 4.0, 1.9, 2.0])
    assert ids.shape == (5, 4)
    assert ((ids != X).sum(-1) == 1).all()
    assert set(ids[ids != X].tolist()) <= {20, 21, 22}
    assert torch.equal(state.prompt_ids, ids[1])
    assert step.loss == 2.0  # of x, which the step began with
    assert step.found_ids is None


@pytest.mark.parametrize(("buffer_size", "moves"), [(1, False), (0, True)])
def test_gcg_keeps_x_unless_told_otherwise(vocabulary, buffer_size, moves):
    method = GCG(search_width=3, topk=3, filter_ids=False, buffer_size=buffer_size)
    ids, _, state = gcg_step(method, vocabulary, [3.0, 2.5, 4.0])
    assert torch.equal(state.prompt_ids, ids[1] if moves else X)


def test_gcg_says_when_it_has_found_the_target(vocabulary):
    method = GCG(search_width=3, topk=3, filter_ids=False)
    ids, step, _ = gcg_step(method, vocabulary, [3.0, 1.5, 4.0], right=6)
    assert torch.equal(step.found_ids, ids[1])


# ---- SwapSearch


def answers(vocabulary, loss, right=lambda ids: 0):
    """Made-up scores of each prompt; swaps are all that are allowed, the best first."""

    def answer(asked):
        width = sum(len(example.ids) for example in asked.examples)
        losses = torch.tensor([loss(ids, width) for ids in asked.prompts.tolist()])
        said = torch.stack([outputs(1, right(ids))[0] for ids in asked.prompts.tolist()])
        swap_ids = None
        if asked.swaps is not None:
            [ids] = asked.prompts.tolist()
            swaps = itertools.product(range(len(ids)), vocabulary.token_ids.tolist())
            by_swap = torch.tensor(
                [loss([*ids[:i], v, *ids[i + 1 :]], width) for i, v in swaps]
            ).view(len(ids), -1)
            positions, barred_ids = asked.swaps.barred.T
            by_swap[positions, vocabulary.columns(barred_ids)] = torch.inf
            values, columns = by_swap.sort(dim=-1)
            swap_ids = vocabulary.ids(columns).masked_fill(values.isinf(), NO_SWAP)
        return Scores(losses, said[:, :width], swap_ids)

    return answer


def test_swap_search_puts_together_what_helps_and_ends_at_the_best_prompt(vocabulary):
    wanted = [24, 25, 26, 27]
    answer = answers(
        vocabulary, lambda ids, _: float(sum(a != b for a, b in zip(ids, wanted, strict=True)))
    )
    method = SwapSearch(width=300)
    slot = open_slot(vocabulary, TARGET, 4)
    state = method.begin(slot, X)
    step, state = drive(method.step(slot, state), answer)
    assert state.at.ids.tolist() == wanted  # all four in one step, as each of them helps
    assert float(step.loss) == state.at.score == 0.0
    assert step.found_ids is None  # no token of the target is right yet
    for _ in range(20):
        _, state = drive(method.step(slot, state), answer)
    assert method.prompt_ids(slot, state).tolist() == wanted
    assert state.at.ids.tolist() != wanted  # it has stepped aside


def test_the_best_prompt_has_most_right_tokens_whatever_its_score(vocabulary):
    """More of the target is read behind it, which makes its score the worse one."""
    better = [15, 16, 17, 25]

    def loss(ids, width):
        if ids == X.tolist():
            return 0.2
        return (0.9 if width == 3 else 1.5) if ids == better else 5.0

    def right(ids):
        return {tuple(X.tolist()): 1, tuple(better): 2}.get(tuple(ids), 0)

    method = SwapSearch(width=300, horizon=2)
    slot = open_slot(vocabulary, TARGET, 4)
    answer = answers(vocabulary, loss, right)
    step, state = drive(method.step(slot, method.begin(slot, X)), answer)
    assert state.best.ids.tolist() == state.at.ids.tolist() == better
    assert state.best.score == pytest.approx(1.5 - 2)  # that of X was 0.2 - 1
    assert (state.best_right, state.right) == (2, [2])
    assert step.output_ids.tolist() == [5, 9, 0, 0, -1, -1]  # -1 is beyond the horizon
    for _ in range(3):
        _, state = drive(method.step(slot, state), answer)
        assert method.prompt_ids(slot, state).tolist() == better


def test_the_score_decides_between_prompts_with_as_many_right_tokens(vocabulary):
    better = [15, 16, 17, 25]
    answer = answers(vocabulary, lambda ids, _: 1.0 if ids == better else 2.0, lambda ids: 1)
    method = SwapSearch(width=300, horizon=2)
    slot = open_slot(vocabulary, TARGET, 4)
    _, state = drive(method.step(slot, method.begin(slot, X)), answer)
    for _ in range(10):
        assert state.best.ids.tolist() == better
        _, state = drive(method.step(slot, state), answer)
    assert state.at.ids.tolist() != better
    assert len(state.barred) > 0


def test_a_tie_that_rounding_breaks_now_so_now_so_ends_nothing(vocabulary):
    """A pass of another length may round differently, and so decode another token."""
    turns = itertools.cycle([1, 2])
    method = SwapSearch(width=1, horizon=2)
    slot = open_slot(vocabulary, TARGET, 4)
    answer = answers(vocabulary, lambda ids, _: 1.0, lambda ids: next(turns))
    _, state = drive(method.step(slot, method.begin(slot, X)), answer)
    assert state.right == [2]


# ---- DLMI


@pytest.mark.parametrize("next_token_tau", [None, 0.5])
def test_dlmi_descends_on_the_mean_over_its_samples(vocabulary, next_token_tau):
    method = DLMI(
        tau0=2.0,
        num_samples=3,
        teacher_forcing=next_token_tau is None,
        next_token_tau=next_token_tau,
        loss="hinge",
    )
    slot = open_slot(vocabulary, TARGET, 4, method)
    with torch.no_grad():
        method.init(slot)
    seeds = set()
    for slot.step in range(3):
        steps = method.step(slot, None)
        asked = next(steps)
        assert (asked.count, asked.length, asked.loss, asked.has_gradient) == (3, 4, "hinge", True)
        assert asked.prompts.logits is slot.params["Z"]
        torch.testing.assert_close(asked.prompts.tau, 2 * (1 + slot.params["Phi"].tanh()))
        assert asked.teacher_forcing == (next_token_tau is None)
        seeds.add(asked.prompts.seed)
        if next_token_tau is not None:
            assert asked.next_token.tau == next_token_tau
            seeds.add(asked.next_token.seed)
        rows = asked.prompts.logits.softmax(-1) / asked.prompts.tau[:, None]
        losses = torch.stack([rows[0, 0], rows[1, 1], 3 * rows[2, 2]])
        with pytest.raises(StopIteration) as end:
            steps.send(Scores(losses, outputs(3, right=2)))
        step, _ = end.value.value
        torch.testing.assert_close(step.loss, losses.mean())
        assert torch.equal(step.output_ids, outputs(1, right=2)[0])
        gradients = torch.autograd.grad(step.loss, [slot.params["Z"], slot.params["Phi"]])
        assert all((gradient[:3] != 0).any(-1).all() for gradient in gradients)
        assert (gradients[0][3] == 0).all()  # no loss depends on the last position
    assert len(seeds) == (3 if next_token_tau is None else 6)  # noise of its own for each


# ---- REINFORCE


def reinforce_steps(tiny, baseline, losses):
    """Gradients of steps with given losses, and the averages that were kept."""
    method = REINFORCE(baseline=baseline, num_samples=4)
    slot = open_slot(Vocabulary(tiny), TARGET, 5, method)
    state, gradients, averages = REINFORCEState(), [], []
    for values in losses:
        scores = Scores(torch.tensor(values), outputs(4))
        step, state = drive(method.step(slot, state), lambda _, scores=scores: scores)
        assert float(step.value) == pytest.approx(sum(values) / 4)
        gradients.append(torch.autograd.grad(step.loss, slot.params["Z"])[0])
        averages.append(float(state.average))
        slot.step += 1
    return gradients, averages


def test_ema_baseline_is_updated_after_use(tiny):
    gradients, averages = reinforce_steps(tiny, "ema", [[4.0] * 4, [2.0] * 4, [2.0] * 4])
    assert averages == pytest.approx([4.0, 3.8, 3.62])
    assert (gradients[0] == 0).all()  # no sample is better than the others
    assert (gradients[1] != 0).any()  # 2 against the old average of 4


def test_as_code_weighs_the_newest_loss_and_starts_at_zero(tiny):
    gradients, averages = reinforce_steps(tiny, "as_code", [[4.0] * 4, [2.0] * 4])
    assert averages == pytest.approx([4.0, 0.1 * 4 + 0.9 * 2])
    assert (gradients[0] == 0).all()


@pytest.mark.parametrize("average", [None, 1.7])
@pytest.mark.parametrize("samples", [2, 3])
def test_no_step_of_reinforce_is_biased(tiny, tmp_path, monkeypatch, average, samples):
    """All draws of all samples, weighed by their probability: the first step, and later ones."""
    path = tmp_path / "tokens.txt"
    path.write_text("w1\nw2\nw3\n")
    method = REINFORCE(num_samples=samples)
    slot = open_slot(Vocabulary(tiny, [str(path)]), TARGET, 2, method)
    logits = slot.params["Z"]
    with torch.no_grad():
        logits.copy_(torch.tensor([[0.3, -1.0, 0.8], [0.1, 0.5, -0.4]]))
    prompts = torch.tensor(list(itertools.product(range(3), repeat=2)))  # (9, N)
    losses = torch.tensor([3.0, 0.5, 2.0, 7.0, 1.0, 4.0, 0.0, 6.0, 2.5], dtype=torch.float64)
    probabilities = sample_log_probs(logits, prompts).exp()
    [exact] = torch.autograd.grad((probabilities * losses).sum(), logits)
    state = REINFORCEState(None if average is None else torch.tensor(average).double())
    mean = torch.zeros_like(logits)
    for draws in itertools.product(range(9), repeat=samples):
        chosen = torch.tensor(draws)
        monkeypatch.setattr(
            "dlmi.methods.reinforce.sample_columns", lambda *_, c=chosen: prompts[c]
        )
        scores = Scores(losses[chosen], outputs(samples))
        step, _ = drive(method.step(slot, state), lambda _, scores=scores: scores)
        [gradient] = torch.autograd.grad(step.loss, logits)
        mean += probabilities[chosen].prod().detach() * gradient
    torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-12)
