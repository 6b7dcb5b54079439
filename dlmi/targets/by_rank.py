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
    jobs = [(mean_rank, sample) for mean_rank in k for sample in range(per_k)]
    noise = np.random.RandomState(seed)
    # Enough for every target; more is drawn only when stripped targets come out empty.
    stream = noise.standard_normal(len(jobs) * length)
    targets: list[Target] = []
    start = 0
    while len(targets) < len(jobs):
        waiting = jobs[len(targets) :]
        if missing := len(waiting) * length - (len(stream) - start):
            stream = np.concatenate([stream, noise.standard_normal(max(0, missing))])
        draws = stream[start : start + len(waiting) * length].reshape(-1, length)
        ranks = np.array([mean_rank for mean_rank, _ in waiting])[:, None] + sigma * draws
        ranks = np.clip(np.rint(ranks), 1, vocab_size).astype(int)
        walks = _walk(lm, ranks, exclude_special)
        # All walks run as one batch, each from its own draws. The first that ends early shifts the
        # stream for those after it, so these are walked again.
        for job, (ids, probabilities), row in zip(waiting, walks, ranks, strict=True):
            used = ids.index(lm.eos_id) + 1 if lm.eos_id in ids else length
            start += used
            kept = ids[:used]
            if eos == "strip":
                kept = [i for i in kept if i != lm.eos_id]
            elif lm.eos_id is not None:
                kept += [lm.eos_id] * (length - used)
            if kept:
                found: dict[str, Any] = {
                    "ranks": tuple(row[:used].tolist()),
                    "probabilities": tuple(probabilities[:used]),
                    "perplexity": float(np.exp(-np.log(probabilities[:used]).mean())),
                }
                target_id = f"k{job[0]}_sample{job[1]}"
                targets.append(Target.single(target_id, kept, lm.decode(kept), k=job[0], **found))
            if used < length or not kept:
                break
    return targets


def _walk(
    lm: FrozenLM, ranks: "np.ndarray[Any, Any]", exclude_special: bool
) -> list[tuple[list[int], list[float]]]:
    """Follow given ranks, (R, M), from BoS; rows run in batches with a KV cache."""
    barred = set(lm.tokenizer.all_special_ids) - {lm.eos_id} if exclude_special else set()
    allowed = [i for i in lm.prompt_token_ids.tolist() if i not in barred]
    allowed_ids = torch.tensor(allowed, device=lm.device)
    rank_index = torch.from_numpy(ranks).to(lm.device).clamp(max=len(allowed)) - 1
    walks: list[tuple[list[int], list[float]]] = []
    for rows in torch.split(rank_index, _WALK_ROWS):
        ids, probabilities = _walk_batch(lm, rows, allowed_ids)
        walks += zip(ids.tolist(), probabilities.double().tolist(), strict=True)
    return walks


@torch.no_grad()
def _walk_batch(lm: FrozenLM, rank_index: Tensor, allowed_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and probabilities, (R, M) each, of walks by rank from BoS."""
    ids: list[Tensor] = []

    def token_of_rank(logits: Tensor, step: int) -> Tensor:
        # By logits, and stable: float32 probabilities underflow to ties.
        order = logits[:, 0, allowed_ids].argsort(dim=-1, descending=True, stable=True)
        ids.append(allowed_ids[order.gather(-1, rank_index[:, step : step + 1])])
        return lm.embed(ids[-1])

    length = rank_index.shape[1]
    bos_embeds = lm.embed(torch.full((len(rank_index), 1), lm.bos_id, device=lm.device))
    logits = lm.free_run(bos_embeds, length, token_of_rank)
    token_of_rank(logits[:, -1:], length - 1)  # the last token is chosen but never read
    chosen_ids = torch.cat(ids, dim=1)
    return chosen_ids, logits.softmax(-1).gather(-1, chosen_ids[..., None]).squeeze(-1)


def describe_target(lm: FrozenLM, target: Target) -> Target:
    """Fill in rank, probability and perplexity, as far as the target lacks them."""
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
