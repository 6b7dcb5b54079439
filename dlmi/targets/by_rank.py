"""Algorithm 2 of the DLMI paper: targets whose tokens have a rank of about k under the LM."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.targets.target import Target

_WALK_ROWS = 64  # bounds the memory of generation: rows x M x V logits are held at once


def generate_targets(
    lm: FrozenLM,
    k: Sequence[int],
    per_k: int,
    length: int,
    sigma: float = 1.0,
    seed: int = 42,
    eos: Literal["pad", "strip"] = "pad",
    exclude_special: bool = False,
) -> list[Target]:
    """Algorithm 2: walk the LM from BoS, taking at each step the token of rank k' ~ N(k, sigma^2).

    One stream of numpy's legacy generator feeds all targets, k ascending, a draw per token; a
    target that ends in EoS draws no more. So the same seed gives the ranks of the published sets.
    An empty target (EoS first, and `strip`) is drawn again. Arguments are those of `ByRank`.
    """
    vocab_size = len(lm.prompt_token_ids)
    for mean_rank in k:
        if not 1 <= mean_rank <= vocab_size:
            raise InputError(
                f"Expected `data.targets.k` to hold ranks from 1 to {vocab_size} (the vocabulary "
                f"of {lm.name}), but got {mean_rank}."
            )
    barred = set(lm.tokenizer.all_special_ids) - {lm.eos_id} if exclude_special else set()
    allowed = [i for i in lm.prompt_token_ids.tolist() if i not in barred]
    allowed_ids = torch.tensor(allowed, device=lm.device)
    jobs = [(mean_rank, sample) for mean_rank in k for sample in range(per_k)]
    noise = np.random.RandomState(seed)
    stream = np.empty(0)  # draws that no target has used yet
    targets: list[Target] = []
    while len(targets) < len(jobs):
        waiting = jobs[len(targets) :]
        missing = max(0, len(waiting) * length - len(stream))
        stream = np.concatenate([stream, noise.standard_normal(missing)])
        draws = stream[: len(waiting) * length].reshape(-1, length)
        means = np.array([mean_rank for mean_rank, _ in waiting])[:, None]
        ranks = torch.from_numpy(np.rint(means + sigma * draws)).long().clamp(1, vocab_size)
        # All walks run as one batch, each from its own draws. The first that ends early shifts the
        # stream for those after it, so these are walked again.
        parts = torch.split(ranks, _WALK_ROWS)
        walks = [walk for rows in parts for walk in _walk(lm, rows, allowed_ids)]
        for (mean_rank, sample), (ids, probs), row in zip(waiting, walks, ranks, strict=True):
            used = ids.index(lm.eos_id) + 1 if lm.eos_id in ids else length
            stream = stream[used:]
            kept = ids[:used] + ids[used - 1 : used] * (length - used)
            if eos == "strip":
                kept = [i for i in kept if i != lm.eos_id]
            if kept:
                found: dict[str, Any] = {
                    "ranks": tuple(row[:used].tolist()),
                    "probabilities": tuple(probs[:used]),
                    "perplexity": float(np.exp(-np.log(probs[:used]).mean())),
                }
                target_id = f"k{mean_rank}_sample{sample}"
                targets.append(
                    Target.single(target_id, kept, lm.decode(kept), k=mean_rank, **found)
                )
            if used < length or not kept:
                break
    return targets


@torch.no_grad()
def _walk(lm: FrozenLM, ranks: Tensor, allowed_ids: Tensor) -> list[tuple[list[int], list[float]]]:
    """Ids and probabilities of walks from BoS, each along its own ranks, (R, M)."""
    ids: list[Tensor] = []
    rank_index = ranks.to(lm.device).clamp(max=len(allowed_ids)) - 1

    def token_of_rank(logits: Tensor, step: int) -> Tensor:
        # By logits, and stable: float32 probabilities underflow to ties.
        order = logits[:, 0, allowed_ids].argsort(dim=-1, descending=True, stable=True)
        ids.append(allowed_ids[order.gather(-1, rank_index[:, step : step + 1])])
        return lm.embed(ids[-1])

    rows, length = ranks.shape
    bos_embeds = lm.embed(torch.full((rows, 1), lm.bos_id, device=lm.device))
    logits = lm.free_run(bos_embeds, length, token_of_rank)
    token_of_rank(logits[:, -1:], length - 1)  # the last token is chosen but never read
    chosen_ids = torch.cat(ids, dim=1)
    probs = logits.softmax(-1).gather(-1, chosen_ids[..., None]).squeeze(-1)
    return list(zip(chosen_ids.tolist(), probs.double().tolist(), strict=True))


def describe_target(lm: FrozenLM, target: Target) -> Target:
    """Fill in ranks, probabilities and perplexity if the target has none."""
    if target.probabilities is not None:
        return target
    ids = torch.tensor([target.ids], device=lm.device)
    bos_embeds = lm.embed(torch.tensor([[lm.bos_id]], device=lm.device))
    with torch.no_grad():
        logits = lm.target_logits(bos_embeds, ids)[0]  # (M, V)
    chosen = logits.gather(-1, ids[0, :, None])
    log_probs = logits.log_softmax(-1).gather(-1, ids[0, :, None]).double().flatten()
    return dataclasses.replace(
        target,
        ranks=tuple((1 + (logits > chosen).sum(-1)).tolist()),
        probabilities=tuple(log_probs.exp().tolist()),
        perplexity=float(log_probs.mean().neg().exp()),
    )
