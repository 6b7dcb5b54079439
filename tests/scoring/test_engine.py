"""The engine: passes of many kinds in one call, and gradients with respect to tokens."""

import torch
from helpers.slots import random_ids
from torch.nn import functional as F

from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.scoring.engine import Engine
from dlmi.scoring.passes import NO_SWAP, Pass, Swaps
from dlmi.targets.context import Context, Example
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

# The tiny Llama's norms are float32 inside, so a batch rounds differently from a row.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ONE, OTHER = Example("one", (3, 4, 5, 6), ""), Example("other", (7, 8), "")
FRAMED = Example("framed", (9, 4), "", Context(((8, 3), (5,)), read_once=2))


def test_passes_of_any_kind_are_answered_together_as_alone(tiny):
    """Losses, decodes, directions, lengths and examples of all kinds, in one call."""
    vocabulary = Vocabulary(tiny)
    ids = random_ids(tiny, 3, 5)
    swaps = Swaps(vocabulary.for_target(Target.single("t", (3,), ""), key=0), 4)
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, len(vocabulary), dtype=torch.float64, generator=rng).requires_grad_()
    weights = torch.tensor([1.0, 0.5, 0.5, 1.0, 2.0, 1.0])
    passes = [
        Pass(ids, [ONE]),
        Pass(ids[:1], [OTHER], "margin", swaps=swaps),
        Pass(ids[2:], [OTHER], swaps=swaps),  # like the next one, but for its swaps
        Pass(SoftPrompt(logits, logits.new_ones(5), "gumbel_softmax", 2, seed=3), [OTHER]),
        Pass(ids, [ONE, FRAMED], token_weights=weights),
        Pass(ids, [OTHER], like_ids=ids[1]),
        Pass(ids[:2, :3], [FRAMED], teacher_forcing=False),
        Pass(ids[1:2], [FRAMED], swaps=swaps, norm_gradient_scale=0.5),
    ]
    together = Engine(vocabulary)(passes)
    for asked, scores in zip(passes, together, strict=True):
        [alone] = Engine(vocabulary)([asked])
        torch.testing.assert_close(scores.losses, alone.losses, **CLOSE)
        assert torch.equal(scores.output_ids, alone.output_ids)
        assert (scores.swap_ids is None) == (asked.swaps is None)
        if asked.swaps is not None:
            assert torch.equal(scores.swap_ids, alone.swap_ids)
        assert scores.losses.requires_grad == isinstance(asked.prompts, SoftPrompt)


def test_swaps_are_in_the_order_of_the_one_hot_gradient(tiny):
    """Averaged over examples, with weights of their tokens; what is barred is no swap."""
    vocabulary = Vocabulary(tiny)
    tokens = vocabulary.for_target(Target.single("t", (3,), ""), key=0)
    ids, weights = random_ids(tiny, 5), torch.tensor([1.0, 0.3, 0.3, 1.0, 1.0, 0.5])
    barred = torch.tensor([[0, 9], [4, 12]])
    swaps = Swaps(tokens, len(vocabulary), barred)
    asked = Pass(ids[None], [ONE, OTHER], swaps=swaps, token_weights=weights)
    [scores] = Engine(vocabulary)([asked])
    rows = F.one_hot(vocabulary.columns(ids), len(vocabulary)).double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for example, own in zip((ONE, OTHER), weights.split([4, 2]), strict=True):
        target_ids = torch.tensor(example.ids)
        logits = tiny.target_logits((rows @ vocabulary.matrix)[None], target_ids[None])[0]
        losses = F.cross_entropy(logits, target_ids, reduction="none")
        total = total + (losses * own).sum() / own.sum() / 2
    torch.testing.assert_close(scores.losses[0], total.detach(), **CLOSE)
    [gradient] = torch.autograd.grad(total, rows)
    for position, found in enumerate(scores.swap_ids):
        left_out = {int(token) for place, token in barred if place == position}
        assert set(vocabulary.token_ids.tolist()) - set(found.tolist()) == left_out
        assert found[len(vocabulary) - len(left_out) :].tolist() == [NO_SWAP] * len(left_out)
        kept = vocabulary.columns(found[: len(vocabulary) - len(left_out)])
        assert (gradient[position, kept].diff() >= -1e-5).all()
