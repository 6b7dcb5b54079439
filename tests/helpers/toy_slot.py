"""A slot and a reader without an LM: the loss of a prompt is a quadratic form of its rows."""

from types import SimpleNamespace

import torch
from torch import nn

from dlmi.estimators.soft_prompt import SoftPrompt, soft_embeds
from dlmi.methods.slot import Slot
from dlmi.scoring.passes import Cost, Scores
from dlmi.targets.target import Target


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class ToyReader:
    """Answers passes by a loss of rows, (C, N, V) to (C,); a token embeds to its one-hot row."""

    def __init__(self, loss, tokens, dtype=torch.float64):
        self.loss, self.matrix = loss, torch.eye(tokens, dtype=dtype)

    def price(self, asked, account):
        return Cost()

    def __call__(self, passes):
        return [self._scores(asked.prompts) for asked in passes]

    def _scores(self, prompts):
        if isinstance(prompts, SoftPrompt):
            [rows] = soft_embeds([prompts], self.matrix)
        else:
            rows = self.matrix[prompts]
        return Scores(self.loss(rows), torch.zeros(len(rows), 1, dtype=torch.int64))


def quadratic(length, tokens):
    """A reader whose loss knows all pairs of positions."""
    weights = normal(length * tokens, length * tokens, seed=1)
    return ToyReader(lambda rows: (rows.flatten(1) @ weights * rows.flatten(1)).sum(-1), tokens)


def toy_slot(logits, phi=None, state=None, key=0):
    """A slot at given Z and Phi."""
    params = {"Z": nn.Parameter(logits.clone())}
    if phi is not None:
        params["Phi"] = nn.Parameter(phi.clone())
    target = Target.single("toy", (0,), "toy")
    tokens = SimpleNamespace(vocabulary=range(logits.shape[1]), ids=lambda columns: columns)
    rng = torch.Generator()
    slot = Slot(target, target.examples, tokens, params, len(logits), rng, key=key)
    slot.state = state
    return slot
