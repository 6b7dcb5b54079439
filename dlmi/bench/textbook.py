"""A textbook implementation of a DLMI step, in its own process.

Gumbel-Softmax on S copies of Z, a product with E, logits at all positions, Adam: a direct
implementation with PyTorch's and the system's defaults.
"""

import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlmi.bench.timing import peak_of, seconds_of
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


class TextbookProcess:
    """A child process that loads the LM and makes textbook steps on request."""

    def __init__(self, lm: str, dtype: DType, device: torch.device, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, lm, dtype, str(device), threads)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: str, *arguments: Any) -> float:
        """`begin` (N, S, target ids), then `step` (seconds) and `peak` (bytes)."""
        self._connection.send((question, *arguments))
        answer: float = self._connection.recv()
        return answer

    def __enter__(self) -> "TextbookProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self._connection.close()
        self._process.join(timeout=10)


def _serve(connection: Connection, name: str, dtype: DType, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    lm = load_lm(name, dtype, device)
    with suppress(EOFError):  # the parent has closed the connection
        while True:
            question, *arguments = connection.recv()
            if question == "begin":
                length, samples, target_ids = arguments
                textbook = Textbook(lm, length, samples, torch.tensor(target_ids, device=lm.device))
                question = "step"  # the first one warms up
            measure = seconds_of if question == "step" else peak_of
            connection.send(measure(textbook.step, lm.device))
