"""A textbook implementation of a DLMI step, in its own process.

Gumbel-Softmax on S copies of Z, a product with E, logits at all positions, Adam: a direct
implementation with PyTorch's and the system's defaults.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlmi.estimators.temperature import temperature_law
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.loading import load_lm
from dlmi.lm.placement import DType


class Textbook:
    """A direct implementation of DLMI: S samples of N tokens for a target (1, M)."""

    def __init__(
        self, lm: FrozenLM, length: int, samples: int, target_ids: Tensor, tau0: float = 100.0
    ) -> None:
        self.lm = lm
        self.target_ids = target_ids.expand(samples, -1)
        self.samples = samples
        self.tau0 = tau0
        self.matrix = lm.embed(lm.prompt_token_ids.to(lm.device)).float()
        self.logits = nn.Parameter(torch.randn(length, len(self.matrix), device=lm.device))
        self.phi = nn.Parameter(torch.randn(length, device=lm.device))
        self.optimizer = torch.optim.Adam([self.logits, self.phi], lr=0.1)

    def step(self) -> None:
        """One step."""
        tau = temperature_law(self.phi, self.tau0)[:, None]  # (N, 1)
        copies = self.logits.expand(self.samples, -1, -1)
        noise = -torch.empty_like(copies).exponential_().log()
        rows = torch.softmax((copies + noise) / tau, dim=-1)  # (S, N, V)
        prompt_embeds = (rows @ self.matrix).to(self.lm.dtype)
        target_embeds = self.lm.embed(self.target_ids[:, :-1])
        inputs_embeds = torch.cat([prompt_embeds, target_embeds], dim=1)
        logits = self.lm.model(inputs_embeds=inputs_embeds, use_cache=False).logits.float()
        logits = logits[:, -self.target_ids.shape[1] :]
        loss = F.cross_entropy(logits.flatten(0, 1), self.target_ids.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


_lm: FrozenLM  # these two are set in the child process alone
_textbook: Textbook


def textbook_process(lm: str, dtype: DType, device: torch.device, threads: int) -> Executor:
    """A child process that loads the LM; the functions below run in it."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _load, (lm, dtype, str(device), threads))


def _load(lm: str, dtype: DType, device: str, threads: int) -> None:
    global _lm
    torch.set_num_threads(threads)
    _lm = load_lm(lm, dtype, device)


def begin_textbook(length: int, samples: int, target_ids: list[list[int]]) -> None:
    """Begin a new prompt, and warm up."""
    global _textbook
    _textbook = Textbook(_lm, length, samples, torch.tensor(target_ids, device=_lm.device))
    _textbook.step()


def measure_textbook(measure: Callable[[Callable[[], None], torch.device], Any]) -> Any:
    """What `seconds_of` or `peak_of` gives for a step."""
    return measure(_textbook.step, _lm.device)
