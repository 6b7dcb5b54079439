import numpy as np
import pytest
import torch

from dlmi import InputError, load_lm
from dlmi.targets.by_rank import describe_target, generate_targets
from dlmi.targets.target import Target


def sequential_targets(lm, ks, per_k, length, sigma, seed):
    """Algorithm 2 as written down: one sample after the other, no batch, no cache."""
    rng = np.random.RandomState(seed)
    everything = []
    for k in ks:
        for _ in range(per_k):
            ids, ranks = [lm.bos_id], []
            for _ in range(length):
                logits = lm.model(input_ids=torch.tensor([ids])).logits[0, -1]
                logits = logits[lm.prompt_token_ids]
                order = torch.argsort(logits, descending=True, stable=True)
                rank = int(np.clip(np.rint(rng.normal(k, sigma)), 1, len(order)))
                ranks.append(rank)
                ids.append(int(lm.prompt_token_ids[order[rank - 1]]))
                if ids[-1] == lm.eos_id:
                    break
            everything.append((tuple(ids[1:]), tuple(ranks)))
    return everything


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("seed", range(6))
def test_algorithm_2_against_the_sequential_walk(model_folder, kind, seed):
    """Many of these seeds end targets early, which shifts the stream for those after."""
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    expected = sequential_targets(lm, [1, 4, 20], 3, 12, 2.0, seed)
    padded = generate_targets(lm, [1, 4, 20], 3, 12, 2.0, seed)
    for target, (ids, ranks) in zip(padded, expected, strict=True):
        assert target.ranks == ranks
        assert target.ids == ids + (lm.eos_id,) * (12 - len(ids))
        bos_and_ids = torch.tensor([[lm.bos_id, *ids]])
        log_probs = lm.token_log_probs(bos_and_ids)[0]
        np.testing.assert_allclose(np.log(target.probabilities), log_probs, rtol=1e-4)
        assert target.perplexity == pytest.approx(float(log_probs.mean().neg().exp()), rel=1e-4)


def test_some_seed_does_end_early(model_folder):
    lm = load_lm(str(model_folder()), dtype="float64")
    lengths = [
        len(ids) for seed in range(6) for ids, _ in sequential_targets(lm, [4], 3, 12, 2.0, seed)
    ]
    assert min(lengths) < 12 == max(lengths)


def test_strip_drops_eos_and_never_gives_an_empty_target(tiny):
    targets = generate_targets(tiny, range(1, 20), 3, 12, 3.0, seed=0, eos="strip")
    assert len({target.id for target in targets}) == 57
    assert all(target.ids and tiny.eos_id not in target.ids for target in targets)
    assert {len(target.ids) for target in targets} != {12}


def test_exclude_special(tiny):
    targets = generate_targets(tiny, [1, 8, 20], 8, 8, 4.0, exclude_special=True)
    special = set(tiny.tokenizer.all_special_ids) - {tiny.eos_id}
    plain = generate_targets(tiny, [1, 8, 20], 8, 8, 4.0)
    assert not special & {token for target in targets for token in target.ids}
    assert special & {token for target in plain for token in target.ids}


def test_published_ranks_of_seed_42(tiny):
    target = generate_targets(tiny, [1], 1, 20, 1.0, 42)[0]
    published = (1, 1, 2, 3, 1, 1, 3, 2, 1, 2) + (1,) * 10
    assert target.ranks == published[: len(target.ranks)]
    noise = np.random.RandomState(42).standard_normal(20)
    assert tuple(np.clip(np.rint(1 + noise), 1, 99).astype(int)) == published


def test_ranks_are_clipped_to_the_vocabulary(tiny):
    targets = generate_targets(tiny, [1, len(tiny.prompt_token_ids)], 2, 6, 30.0)
    ranks = [rank for target in targets for rank in target.ranks]
    assert min(ranks) == 1
    assert max(ranks) == len(tiny.prompt_token_ids)


@pytest.mark.parametrize("k", [0, 32])
def test_k_beyond_the_vocabulary_is_refused(tiny, k):
    with pytest.raises(InputError, match=f"`data.targets.k`.*1 to 31.*got {k}"):
        generate_targets(tiny, [1, k], 1, 4)


def test_describe_target_measures_rank_probability_and_perplexity(tiny):
    generated = generate_targets(tiny, [3], 1, 5, eos="strip", seed=3)[0]
    bare = Target.single(generated.id, generated.ids, generated.text, k=generated.k)
    described = describe_target(tiny, bare)
    assert described.ranks == generated.ranks[: len(described.ranks)]
    np.testing.assert_allclose(described.probabilities, generated.probabilities, rtol=1e-4)
    assert describe_target(tiny, generated) is generated
