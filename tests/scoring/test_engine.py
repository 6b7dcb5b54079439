"""The engine: passes of many kinds in one call, and gradients with respect to tokens."""

import torch
from helpers.slots import random_ids
from torch.nn import functional as F

from dlmi.estimators.soft_prompt import SoftPrompt
from dlmi.scoring.engine import Engine
from dlmi.scoring.passes import Pass
from dlmi.targets.context import Context, Example
from dlmi.tokens.vocabulary import Vocabulary

# The tiny Llama's norms are float32 inside, so a batch rounds differently from a row.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ONE, OTHER = Example("one", (3, 4, 5, 6), ""), Example("other", (7, 8), "")
FRAMED = Example("framed", (9, 4), "", Context(((8, 3), (5,)), read_once=2))


def test_passes_of_any_kind_are_answered_together_as_alone(tiny):
    """Losses, decodes, directions, lengths and examples of all kinds, in one call."""
    vocabulary = Vocabulary(tiny)
    ids = random_ids(tiny, 3, 5)
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, len(vocabulary), dtype=torch.float64, generator=rng).requires_grad_()
    weights = torch.tensor([1.0, 0.5, 0.5, 1.0, 2.0, 1.0])
    passes = [
        Pass(ids, [ONE]),
        Pass(ids[:1], [OTHER], "margin", token_gradient=True),
        Pass(SoftPrompt(logits, logits.new_ones(5), "gumbel_softmax", 2, seed=3), [OTHER]),
        Pass(ids, [ONE, FRAMED], token_weights=weights),
        Pass(ids, [OTHER], like_ids=ids[1]),
        Pass(ids[:2, :3], [FRAMED], teacher_forcing=False),
        Pass(ids[1:2], [FRAMED], token_gradient=True, norm_gradient_scale=0.5),
    ]
    together = Engine(vocabulary)(passes)
    for asked, scores in zip(passes, together, strict=True):
        [alone] = Engine(vocabulary)([asked])
        torch.testing.assert_close(scores.losses, alone.losses, **CLOSE)
        assert torch.equal(scores.output_ids, alone.output_ids)
        assert (scores.token_gradient is None) == (not asked.token_gradient)
        if asked.token_gradient:
            torch.testing.assert_close(scores.token_gradient, alone.token_gradient, **CLOSE)
        assert scores.losses.requires_grad == isinstance(asked.prompts, SoftPrompt)


def test_a_token_gradient_is_that_of_one_hot_rows(tiny):
    """Averaged over examples, with weights of their tokens."""
    vocabulary = Vocabulary(tiny)
    ids, weights = random_ids(tiny, 5), torch.tensor([1.0, 0.3, 0.3, 1.0, 1.0, 0.5])
    asked = Pass(ids[None], [ONE, OTHER], token_gradient=True, token_weights=weights)
    [scores] = Engine(vocabulary)([asked])
    rows = F.one_hot(vocabulary.columns(ids), len(vocabulary)).double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for example, own in zip((ONE, OTHER), weights.split([4, 2]), strict=True):
        target_ids = torch.tensor(example.ids)
        logits = tiny.target_logits((rows @ vocabulary.matrix)[None], target_ids[None])[0]
        losses = F.cross_entropy(logits, target_ids, reduction="none")
        total = total + (losses * own).sum() / own.sum() / 2
    torch.testing.assert_close(scores.losses[0], total.detach(), **CLOSE)
    [expected] = torch.autograd.grad(total, rows)
    torch.testing.assert_close(scores.token_gradient, expected, rtol=1e-4, atol=1e-5)
