"""The search that follows a relaxation, against exhaustion on the tiny LM."""

import dataclasses
import itertools

import pytest
import torch
from conftest import SMALL
from test_contracts import LossCurve, assert_same

from dlmi import InputError
from dlmi.candidates import ReadPrompt
from dlmi.evaluation import evaluate_prompts
from dlmi.frames import NO_FRAME, Frame
from dlmi.methods import ADC, DLMI, GBDA, PEZ, REINFORCE, SODA
from dlmi.refinement import Refinement
from dlmi.round_trip import round_trips
from dlmi.slots import Slot
from dlmi.swaps import count_right, merge_swaps, token_weights
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

TARGET = Target(id="t", ids=(5, 9, 11), text="", k=None)


@pytest.fixture
def vocabulary(tiny):
    return Vocabulary(tiny)


def opened(lm, prompt_ids, target=TARGET):
    """A slot whose prompt has been decoded once."""
    slot = Slot.open(0, target, seed=1, device=torch.device("cpu"))
    [evaluation] = evaluate_prompts(lm, torch.tensor([prompt_ids]), [target], [0])
    slot.record(evaluation)
    return slot


def score_of(lm, prompt_ids, target=TARGET, right=None):
    """From the logits: weighted cross-entropy less right tokens; weights of its own by default."""
    target_ids = torch.tensor([target.ids])
    logits = lm.target_logits(lm.embed(torch.as_tensor(prompt_ids)[None]), target_ids)[0]
    losses = -logits.log_softmax(-1)[range(len(target.ids)), list(target.ids)]
    own = 0
    while own < len(target.ids) and logits[own].argmax() == target.ids[own]:
        own += 1
    weights = [
        1.0 if j <= (own if right is None else right) + 1 else 0.3 for j in range(len(losses))
    ]
    return float((losses * torch.tensor(weights)).sum() / sum(weights)) - own


def test_it_ends_where_no_single_swap_helps(tiny, vocabulary, monkeypatch):
    """Until all swaps are used up; then exhaustion finds no better neighbour either."""
    monkeypatch.setattr("dlmi.refinement._PATIENCE", 1000)
    search = Refinement(vocabulary, width=7)
    slot = opened(tiny, [4, 5, 6])
    for _ in range(200):
        search.step([slot])
        swaps = slot.memory.get("refined_swaps")  # gone when one was taken
        if swaps is not None and (swaps == -1).all():
            break
    found = search.prompt_ids(slot).tolist()
    neighbours = [
        [*found[:i], v, *found[i + 1 :]]
        for i, v in itertools.product(range(3), vocabulary.token_ids.tolist())
    ]
    right = slot.memory["refined_right"]
    scores = [score_of(tiny, ids, right=right) for ids in neighbours]
    assert score_of(tiny, found) == pytest.approx(min(scores), abs=1e-5)
    assert score_of(tiny, found) < score_of(tiny, [4, 5, 6])


def test_it_steps_aside_to_the_best_neighbour_and_does_not_come_back(tiny, vocabulary):
    """As long as there is no new best prompt, it is nowhere twice."""
    search = Refinement(vocabulary, width=6)
    slot = opened(tiny, [4, 5, 6])
    visits, waited = {}, []
    for _ in range(300):
        aside = slot.memory.get("refined_aside_columns")
        swaps = slot.memory.get("refined_swaps")
        waited.append(slot.memory.get("refined_waited", 0))
        is_stuck = waited[-1] == 6 or (swaps is not None and bool((swaps == -1).all()))
        search.step([slot])
        here = tuple(search.columns(slot).tolist())
        since_best = visits.setdefault(slot.memory["refined_best_score"], [])
        if not since_best or since_best[-1] != here:
            since_best.append(here)
        if is_stuck:
            assert here == tuple(aside.tolist())
    assert max(waited) == 6
    assert all(len(set(prompts)) == len(prompts) for prompts in visits.values())
    assert max(len(prompts) for prompts in visits.values()) > 5


def test_the_best_prompt_never_gets_worse_and_stepping_aside_does_not_lose_it(tiny, vocabulary):
    search = Refinement(vocabulary, width=64)
    slot = opened(tiny, [4, 5, 6])
    best, current = [], []
    for _ in range(60):
        search.step([slot])
        best.append(score_of(tiny, search.prompt_ids(slot)))
        current.append(slot.memory["refined_score"])
        here = vocabulary.ids(search.columns(slot))
        assert current[-1] == pytest.approx(score_of(tiny, here), abs=1e-5)
    assert best == sorted(best, reverse=True)
    assert any(later > earlier for earlier, later in itertools.pairwise(current))  # aside
    assert best[-1] == pytest.approx(min(current), abs=1e-5)


def test_no_swap_is_tried_twice_while_the_prompt_stays(tiny, vocabulary, monkeypatch):
    monkeypatch.setattr("dlmi.refinement._PATIENCE", 1000)
    search = Refinement(vocabulary, width=5)
    slot = opened(tiny, [4, 5, 6])
    search._begin(slot)
    seen, score = [], ReadPrompt.score

    def watched(prompt, candidate_ids, **kwargs):
        read = tuple(prompt._readings[0].ids.tolist())
        seen.extend((read, tuple(row)) for row in candidate_ids.tolist())
        return score(prompt, candidate_ids, **kwargs)

    monkeypatch.setattr(ReadPrompt, "score", watched)
    for _ in range(12):
        search.step([slot])
    changes = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in seen]
    swaps = [pair for pair, count in zip(seen, changes, strict=True) if count == 1]
    assert len(swaps) == 60
    assert len(set(swaps)) == len(swaps)
    assert max(changes) > 1  # those that help are put together


def test_a_step_takes_the_best_of_swaps_and_merges(tiny, vocabulary, monkeypatch):
    """Merges are made of swaps that help, and one of them is taken where it is better still."""
    scored, score = [], ReadPrompt.score

    def watched(prompt, candidate_ids, **kwargs):
        losses, output_ids = score(prompt, candidate_ids, **kwargs)
        scores = losses - count_right(output_ids, torch.tensor(TARGET.ids))
        scored.append((id(prompt), candidate_ids.tolist(), scores.tolist()))
        return losses, output_ids

    search = Refinement(vocabulary, width=24)
    slot = opened(tiny, [4, 5, 6, 7, 8, 9])
    search._begin(slot)
    monkeypatch.setattr(ReadPrompt, "score", watched)
    merges_taken = 0
    for _ in range(6):
        before = vocabulary.ids(search.columns(slot)).tolist()
        score_before = slot.memory["refined_score"]
        scored.clear()
        search.step([slot])
        tried = [(rows, scores) for prompt, rows, scores in scored if prompt == scored[0][0]]
        (single, single_scores), *merged = tried
        rows, scores = [before], [score_before]
        for more_rows, more_scores in tried:
            rows, scores = rows + more_rows, scores + more_scores
        best = min(scores)
        assert vocabulary.ids(search.columns(slot)).tolist() == rows[scores.index(best)]
        helping = {
            (i, row[i])
            for row, value in zip(single, single_scores, strict=True)
            for i in range(6)
            if row[i] != before[i] and value < score_before
        }
        for merged_rows, merged_scores in merged:
            for row, value in zip(merged_rows, merged_scores, strict=True):
                changed = {(i, row[i]) for i in range(6) if row[i] != before[i]}
                assert len(changed) > 1
                assert changed <= helping
                merges_taken += value == best and value < min(single_scores)
    assert merges_taken > 0


def test_swaps_that_cost_less_are_drawn_more_often(tiny, vocabulary):
    """In proportion to 1 / cost squared, the tokens read after them: frequencies of first draws."""
    search = Refinement(vocabulary, width=1)
    slot = opened(tiny, [4, 5, 6])
    search._begin(slot)
    search._propose(slot)
    swaps, counts = slot.memory["refined_swaps"].clone(), torch.zeros(3)
    here = search.columns(slot)
    draws = 4000
    for _ in range(draws):
        slot.memory["refined_swaps"] = swaps.clone()
        [candidate] = search._candidates(slot, here)
        counts += candidate != here
    weights = 1 / (3 - torch.arange(3) + len(TARGET.ids) - 1) ** 2
    expected = weights / weights.sum()
    assert counts.sum() == draws
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() < 4 * deviation).all()


def test_merging_with_nothing_to_merge_gives_nothing():
    prompt = torch.tensor([1, 2, 3])
    assert len(merge_swaps(prompt, prompt[None][:0], 6)) == 0
    assert len(merge_swaps(prompt, torch.tensor([[9, 2, 3]]), 6)) == 0
    rows = torch.tensor([[9, 2, 3], [1, 8, 3], [1, 2, 7]])
    assert merge_swaps(prompt, rows, 6).tolist() == [[9, 8, 3], [9, 8, 7]]
    assert merge_swaps(prompt, rows, 2).tolist() == [[9, 8, 3]]


def test_swaps_are_those_that_the_gradient_promises_most_of(tiny, vocabulary, monkeypatch):
    """Against the derivative of the loss along every swap."""
    monkeypatch.setattr("dlmi.refinement._SWAPS_PER_POSITION", 5)
    search = Refinement(vocabulary, width=1)
    slot = opened(tiny, [4, 5, 6])
    search._begin(slot)
    search._propose(slot)
    embeds = tiny.embed(torch.tensor([[4, 5, 6]]))
    weights = token_weights(slot.memory["refined_right"], 3)
    target_ids = torch.tensor([TARGET.ids])

    def slope(position, column):
        share = torch.zeros((), dtype=torch.float64, requires_grad=True)
        direction = torch.zeros_like(embeds)
        direction[0, position] = vocabulary.matrix[column] - embeds[0, position]
        logits = tiny.target_logits(embeds + share * direction, target_ids)[0]
        loss = torch.nn.functional.cross_entropy(logits, target_ids[0], reduction="none")
        loss = (loss * weights).sum() / weights.sum()
        return float(torch.autograd.grad(loss, share)[0])

    here = vocabulary.columns(torch.tensor([4, 5, 6])).tolist()
    for position in range(3):
        others = [column for column in range(len(vocabulary)) if column != here[position]]
        steepest = sorted(others, key=lambda column, p=position: slope(p, column))[:5]
        assert slot.memory["refined_swaps"][position].tolist() == steepest


LONG = Target(id="long", ids=(5, 9, 11, 7, 13, 6), text="", k=None)
FRAMES = {
    "none": NO_FRAME,
    "around": Frame(((1, 2), (3,)), head=2),
    "two slots": Frame(((1,), (2, 8), (3,)), (2, 0), head=1),
}


def count_tokens(lm, monkeypatch):
    """Tokens that really go through the model, forward; a list to be read later."""
    counted, forward = [], lm.model.forward

    def watched(*args, inputs_embeds, **kwargs):
        counted.append(inputs_embeds.shape[0] * inputs_embeds.shape[1])
        return forward(*args, inputs_embeds=inputs_embeds, **kwargs)

    monkeypatch.setattr(lm.model, "forward", watched)
    return counted


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("prompt_bos", [False, True])
def test_a_window_scores_what_whole_prompts_score(tiny, vocabulary, frame, prompt_bos):
    """Candidates that differ inside the window: as if nothing had been read before."""
    target = dataclasses.replace(LONG, frame=FRAMES[frame])
    prompt = torch.tensor([4, 5, 6, 7, 8])
    candidates = prompt.repeat(6, 1)
    candidates[torch.arange(6), torch.tensor([2, 3, 4, 2, 3, 4])] = torch.arange(9, 15)
    narrow = dataclasses.replace(target, frame=target.frame.behind(prompt.tolist(), 2))
    inside = ReadPrompt(tiny, prompt[2:], narrow, prompt_bos).score(candidates[:, 2:])
    whole = ReadPrompt(tiny, prompt, target, prompt_bos).score(candidates)
    torch.testing.assert_close(inside[0], whole[0], rtol=1e-9, atol=1e-9)
    assert torch.equal(inside[1], whole[1])
    for ids in candidates.tolist():
        assert narrow.frame.full_ids(ids[2:]) == target.frame.full_ids(ids)


def test_only_the_window_is_searched_and_it_is_widened_when_nothing_helps(tiny, vocabulary):
    search = Refinement(vocabulary, width=4, window=2, horizon=2)
    start = [4, 5, 6, 7, 8, 9, 10]
    slot = opened(tiny, start, LONG)
    widths = []
    for _ in range(150):
        search.step([slot])
        widths.append(slot.memory["refined_window"])
        first = len(start) - widths[-1]
        assert vocabulary.ids(search.columns(slot))[:first].tolist() == start[:first]
        if (swaps := slot.memory.get("refined_swaps")) is not None:
            assert len(swaps) == widths[-1]
    assert sorted(set(widths)) == [2, 4, 7]
    assert widths == sorted(widths)


def test_the_horizon_moves_with_the_first_mistake(tiny, vocabulary):
    """Scores are those of the target cut off there, with its own weights."""
    search = Refinement(vocabulary, width=16, window=3, horizon=2)
    slot = opened(tiny, [4, 5, 6, 7], LONG)
    seen = set()
    for _ in range(60):
        search.step([slot])
        here = vocabulary.ids(search.columns(slot))
        right, said_ids = slot.memory["refined_right"], slot.memory["refined_output_ids"]
        assert len(said_ids) == min(right + 2, 6)
        cut = dataclasses.replace(LONG, ids=LONG.ids[: right + 2])
        assert slot.memory["refined_score"] == pytest.approx(score_of(tiny, here, cut), abs=1e-5)
        [evaluation] = evaluate_prompts(tiny, here[None], [LONG], [0])
        correct = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(LONG.ids, evaluation.output_ids, strict=True)
        )
        assert right == len(list(correct))
        seen.add(right)
    assert len(seen) > 1


def test_a_tie_that_rounding_breaks_now_so_now_so_ends_nothing(tiny, vocabulary, monkeypatch):
    """A pass of another length may round differently, and so decode another token."""
    search = Refinement(vocabulary, width=4, horizon=2)
    slot = opened(tiny, [4, 5, 6], LONG)
    search._begin(slot)
    outputs = itertools.cycle([(*LONG.ids[:1], 0), (*LONG.ids[:2], 0)])
    monkeypatch.setattr(
        Refinement, "_score", lambda *_: (torch.zeros(1), torch.tensor([next(outputs)]))
    )
    search._move(slot, search.columns(slot), 0.0, torch.tensor(LONG.ids[:2]))
    assert slot.memory["refined_right"] == 2


@pytest.mark.parametrize("window", [2, 5, 9])
def test_a_slot_pays_for_what_the_lm_reads(tiny, vocabulary, window, monkeypatch):
    """All tokens that went through the model, and those of gradients once more."""
    tiny._prefixes.clear()
    search = Refinement(vocabulary, width=6, window=window, horizon=3)
    slot = opened(tiny, [4, 5, 6, 7, 8, 9, 10, 11, 12], LONG)
    counted = count_tokens(tiny, monkeypatch)
    for _ in range(40):
        search.step([slot])
    assert slot.forward_tokens == sum(counted)
    assert 0 < slot.backward_tokens < slot.forward_tokens / 3


def test_slots_do_not_meet(tiny, vocabulary):
    search = Refinement(vocabulary, width=6)
    other = Target(id="u", ids=(7, 8), text="", k=None)
    together = [opened(tiny, [4, 5, 6]), opened(tiny, [9, 9, 9], other)]
    alone = [opened(tiny, [4, 5, 6]), opened(tiny, [9, 9, 9], other)]
    for _ in range(8):
        search.step(together)
        for slot in alone:
            search.step([slot])
    for mine, same in zip(together, alone, strict=True):
        assert search.prompt_ids(mine).tolist() == search.prompt_ids(same).tolist()
        assert mine.token_passes == same.token_passes


@pytest.mark.parametrize("method", [ADC, DLMI, GBDA, PEZ, REINFORCE, SODA])
def test_every_relaxation_hands_over_at_the_share_and_gains_by_it(method, data, fit):
    """Same steps; the second half refines. Its discrete loss is the lower one by far."""
    options = {**SMALL, "steps": 40, "norm_gradient_scale": 0.85, "refine_width": 16}
    if method is REINFORCE:
        del options["norm_gradient_scale"]
    targets = {"k": (3,), "per_k": 4}
    plain_options = {**options, "refine_after": 1.0}
    plain = fit(method(**plain_options), data(**targets))
    refined = fit(method(**{**options, "refine_after": 0.5}), data(**targets))
    unsolved = [i for i, row in refined.items() if row.stop_reason != "solved"]

    def total(rows):
        return sum(rows[i].discrete_loss for i in unsolved)

    assert all(row.exact for i, row in refined.items() if i not in unsolved)
    assert total(refined) <= total(plain)
    assert sum(row.exact for row in refined.values()) >= sum(row.exact for row in plain.values())


def test_z_rests_while_the_prompt_is_refined(data, fit):
    class Watch(LossCurve):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.losses.append(pl_module.Z[0].detach().clone())

    curve = Watch()
    model = DLMI(**{**SMALL, "steps": 20}, num_samples=2, refine_after=0.5)
    fit(model, data(batch_size=1, per_k=1, k=(13,)), callbacks=[curve])
    states = curve.losses
    assert len(states) == 20
    assert not torch.equal(states[8], states[9])
    assert all(torch.equal(states[9], later) for later in states[10:])


def test_refined_prompts_keep_to_the_tokens_that_they_may_hold(data, fit):
    options = {"allowed_tokens": "round_trip", "forbid_target_tokens": "ids", "refine_after": 0.2}
    targets = data(per_k=3)
    rows = fit(ADC(**SMALL, restarts=1, **options), targets)
    for row in rows.values():
        assert row.overlap_ratio == 0
        assert round_trips(targets.lm, row.prompt_ids)


def test_the_share_counts_token_passes_too(data, fit):
    """With a token budget the refinement begins by cost, however many steps that is."""
    options = {**SMALL, "steps": 10**6, "token_budget": 3000, "refine_after": 0.5}
    [row] = fit(SODA(**options), data(batch_size=1, per_k=1, k=(13,))).values()
    # SODA sends every second row back, the refinement hardly any.
    assert 0.1 < row.backward_tokens / row.forward_tokens < 0.3
    assert row.forward_tokens + row.backward_tokens < 3000 + 300


def test_several_slots_give_the_rows_of_one(data, fit):
    options = {**SMALL, "restarts": 1, "refine_after": 0.4, "token_budget": 900}
    expected = fit(ADC(**options), data(batch_size=1))
    assert_same(fit(ADC(**options), data(batch_size=4)), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refine_after": -0.1}, "`model.refine_after` to be a share"),
        ({"refine_after": 1.5}, "`model.refine_after` to be a share"),
        ({"refine_width": 0}, "`model.refine_width`"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        SODA(**settings)
