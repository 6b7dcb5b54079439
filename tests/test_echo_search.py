"""Prompts that echo a target, and the search that starts from them."""

import pytest
import torch
from conftest import SMALL

from dlmi import InputError, load_lm
from dlmi.candidates import score_candidates
from dlmi.echo import echo_prompts, nearest_columns
from dlmi.evaluation import evaluate_prompts
from dlmi.methods import EchoSearch
from dlmi.targets import Target
from dlmi.vocabulary import Vocabulary

TARGET = Target(id="t", ids=(5, 9, 11), text="", k=None)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("forbid", ["none", "ids", "words"])
def test_neighbours_are_the_closest_other_tokens_that_may_be_used(tiny, forbid):
    vocabulary = Vocabulary(tiny, forbid_target_tokens=forbid)
    near = vocabulary.ids(nearest_columns(vocabulary, TARGET, 4)).tolist()
    embeds = tiny.embedding_matrix
    for token_id, found in zip(TARGET.ids, near, strict=True):
        cosines = torch.cosine_similarity(embeds[token_id], embeds, dim=-1)
        others = [i for i in vocabulary.token_ids.tolist() if i not in TARGET.ids]
        assert all(vocabulary.allows(i, TARGET) for i in found)
        assert found == sorted(others, key=lambda i, c=cosines: -c[i])[:4]


@pytest.mark.parametrize("length", [2, 3, 7])
def test_an_echo_follows_the_order_of_the_target_and_ends_with_it(tiny, length):
    vocabulary = Vocabulary(tiny)
    near = nearest_columns(vocabulary, TARGET, 8)
    prompts = echo_prompts(vocabulary, TARGET, length, 50, generator())
    assert prompts.shape == (50, length)
    for place in range(length):
        of_target = (place - length) % 3
        assert torch.isin(prompts[:, place], near[of_target]).all()
        assert prompts[0, place] == near[of_target, 0]
    assert len({tuple(row) for row in prompts.tolist()}) > 10


def test_near_neighbours_are_drawn_more_often(tiny):
    vocabulary = Vocabulary(tiny)
    near = nearest_columns(vocabulary, TARGET, 8)
    draws = echo_prompts(vocabulary, TARGET, 3, 4001, generator())[1:]
    shares = torch.stack([(draws == near[:, rank]).float().mean() for rank in range(8)])
    expected = torch.tensor([0.4 * 0.6**rank for rank in range(7)] + [0.6**7])
    assert (shares - expected).abs().max() < 0.02


def test_a_target_that_leaves_nothing_else_is_echoed_by_itself(tiny):
    everything = Target(id="t", ids=tuple(tiny.prompt_token_ids.tolist()), text="", k=None)
    prompts = echo_prompts(Vocabulary(tiny), everything, 5, 2, generator())
    assert prompts.shape == (2, 5)


@pytest.mark.parametrize("start", ["echo", "random"])
def test_it_starts_from_the_likeliest_start_and_gets_better(start, data, fit):
    targets = data(per_k=2)
    rows = fit(EchoSearch(**{**SMALL, "steps": 12, "eval_every": 1}, start=start), targets)
    few = EchoSearch(**{**SMALL, "steps": 1}, start=start, starts=1)
    first_of_one = fit(few, data(per_k=2))
    for name, row in rows.items():
        losses = [point.discrete_loss for point in row.trace]
        assert losses[0] <= first_of_one[name].trace[0].discrete_loss + 1e-6
        assert row.exact or min(losses) < losses[0]
        assert row.lcs == max(point.lcs for point in row.trace)


def test_starts_differ_in_the_window_alone(data, fit, monkeypatch):
    seen = []

    def watched(lm, prompt_ids, candidate_ids, *args, **kwargs):
        seen.append(candidate_ids)
        return score_candidates(lm, prompt_ids, candidate_ids, *args, **kwargs)

    monkeypatch.setattr("dlmi.methods.echo_search.score_candidates", watched)
    options = {**SMALL, "prompt_length": 9, "steps": 1}
    [row] = fit(EchoSearch(**options, window=4, starts=6), data(per_k=1, k=(3,))).values()
    [starts] = seen
    assert (starts[:, :5] == starts[0, :5]).all()
    assert len({tuple(start) for start in starts[:, 5:].tolist()}) > 3
    # The common beginning is read once, the likeliest start is evaluated: 9 + 6 * (4 + M - 1) ...
    length = len(row.target_ids)
    assert row.trace[0].token_passes <= 9 + 6 * (4 + length - 1) + 9 + 2 * (length - 1)


@pytest.mark.real
def test_an_echo_is_a_better_start_than_random_tokens():
    """On the packaged LM, where the target's own words are barred."""
    real_lm = load_lm("smollm2-135m-instruct")
    vocabulary = Vocabulary(real_lm, ["no_special"], "words")
    ids = tuple(real_lm.encode(" the end of a long day"))
    target = Target(id="t", ids=ids, text="", k=None)
    echoes = vocabulary.ids(echo_prompts(vocabulary, target, 20, 8, generator()))
    allowed = vocabulary.allowed_columns(target)
    picks = torch.randint(len(allowed), (8, 20), generator=generator())
    random = vocabulary.ids(allowed[picks])
    losses = [score_candidates(real_lm, ids[0], ids, target)[0] for ids in (echoes, random)]
    assert losses[0].max() < losses[1].min()
    [evaluation] = evaluate_prompts(real_lm, echoes[:1], [target], [0])
    assert evaluation.discrete_loss == pytest.approx(float(losses[0][0]), abs=1e-4)


@pytest.mark.parametrize("name", ["starts", "refine_width"])
def test_bad_settings_are_refused(name):
    with pytest.raises(InputError, match=f"`model.{name}`"):
        EchoSearch(**{name: 0})
