"""Soft embeddings and their gradients."""

import torch

CPU = torch.device("cpu")

# slots, samples, positions, tokens, width, temperature
CASES = {
    "middling": (2, 3, 4, 700, 8, 1.0),
    "odd sizes": (3, 5, 7, 1009, 13, 0.7),
    "one token": (1, 2, 3, 1, 2, 1.0),
    "one position": (2, 1, 1, 300, 4, 3.0),
    "one of all": (1, 1, 1, 1, 1, 1.0),
    "samples split over groups": (1, 30, 60, 300, 3, 1.0),
    "more positions than a group": (1, 2, 1100, 270, 3, 1.0),
    "high temperature": (1, 4, 5, 900, 6, 100.0),
    "low temperature": (1, 4, 5, 900, 6, 0.05),
}


def make(case, dtype):
    slots, samples, positions, tokens, width, tau = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    logits = [randn(positions, tokens).requires_grad_() for _ in range(slots)]
    scale = torch.rand(slots, positions, generator=generator, dtype=torch.float64) + 0.5
    taus = (tau * scale).to(dtype).requires_grad_()
    incoming = randn(slots, samples, positions, width)
    return logits, taus, randn(tokens, width), list(range(5, 5 + slots)), samples, incoming


def with_gradients(function, logits, tau, matrix, seeds, samples, incoming):
    embeds = function(logits, tau, matrix, seeds, samples)
    gradients = torch.autograd.grad((embeds * incoming).sum(), [*logits, tau])
    return embeds.detach(), *gradients


def assert_close(result, expected, tolerance):
    for ours, truth in zip(result, expected, strict=True):
        scale = truth.abs().max().clamp_min(1e-12)
        assert (ours.double() - truth.double()).abs().max() <= tolerance * scale
