"""Targets: what the LM is to be made to say.

They come from Algorithm 2 of the DLMI paper, whose difficulty k is the mean rank of each chosen
token under the LM itself, or from a file, or from literal texts.
"""

import codecs
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dlmi.errors import InputError
from dlmi.frames import NO_FRAME, Example, Frame, SharedExamples
from dlmi.json_lines import build, parse_object, read_lines
from dlmi.lm import FrozenLM
from dlmi.templates import Template

_WALK_ROWS = 64  # bounds the memory of generation: rows x M x V logits are held at once


@dataclass(frozen=True)
class Target:
    """One target output, or several examples that share one prompt.

    Attributes:
        id: Unique within a run; also seeds the noise of its inversion.
        ids: The M token ids to be produced; of examples, those of all that are evaluated.
        text: Their text.
        k: Difficulty: the mean rank it was generated with, or None.
        ranks: The rank drawn for each token by Algorithm 2; tokens padded after EoS have none.
        probabilities: What the LM gives each of those tokens after BoS and the ones before it.
        perplexity: Of those tokens after BoS.
        frame: Fixed tokens around the prompt; that of an example is its own.
        examples: Where one prompt is for many: what it is read with. Empty for a target alone.
        shared: Where its steps take their examples from; None for a target alone.
    """

    id: str
    ids: tuple[int, ...]
    text: str
    k: int | None = None
    ranks: tuple[int, ...] | None = None
    probabilities: tuple[float, ...] | None = None
    perplexity: float | None = None
    frame: Frame = NO_FRAME
    examples: tuple[Example, ...] = ()
    shared: SharedExamples | None = None

    @functools.cached_property
    def readings(self) -> tuple[Example, ...]:
        """Where its prompt is read: its examples, or the target itself."""
        return self.examples or (Example(self.id, self.ids, self.text, self.frame),)

    @functools.cached_property
    def all_readings(self) -> tuple[Example, ...]:
        """The same with the examples that only steps read, and with those held out."""
        if self.shared is None:
            return self.readings
        return (*self.shared.pool, *self.shared.held_out)

    @functools.cached_property
    def reasons(self) -> bool:
        """Whether the LM writes reasoning of its own before it is to say anything."""
        return any(example.frame.reasoning is not None for example in self.all_readings)

    @functools.cached_property
    def ids_to_say(self) -> tuple[int, ...]:
        """What the LM is to say anywhere in the run."""
        if self.shared is None:
            return self.ids
        return tuple(token_id for example in self.shared.pool for token_id in example.ids)

    def with_examples(self, examples: Sequence[Example]) -> "Target":
        """The same prompt, read with these examples alone."""
        ids = tuple(token_id for example in examples for token_id in example.ids)
        return dataclasses.replace(self, ids=ids, examples=tuple(examples), shared=None)

    def split(self, output_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Outputs of all readings, one after the other, apart."""
        parts, start = [], 0
        for example in self.readings:
            parts.append(tuple(output_ids[start : start + len(example.ids)]))
            start += len(example.ids)
        return parts

    def longest_row(self, prompt_length: int) -> int:
        """Tokens of a prompt, what is around it and its target, where that is longest."""
        fixed = (e.frame.most_tokens + len(e.ids) for e in self.all_readings)
        return prompt_length + max(fixed)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary without what is not there; `from_json` gives the same target back."""
        row = dataclasses.asdict(self)
        left_out = {
            "frame": self.frame == NO_FRAME,
            "examples": not self.examples,
            "shared": self.shared is None,
        }
        return {name: value for name, value in row.items() if not left_out.get(name)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Target":
        """The inverse of `to_json`; `InputError` where a value is of another type."""
        return build(cls, row)


def generate_targets(
    lm: FrozenLM,
    ks: Sequence[int],
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

    Args:
        lm: The model whose outputs these are.
        ks: Difficulties.
        per_k: Targets for each.
        length: M.
        sigma: Spread of the rank.
        seed: Of the rank stream.
        eos: After an EoS, `pad` the target with EoS to M tokens (as the paper has it), or `strip`
            it there (as in the authors' data); an empty target is drawn again.
        exclude_special: Never choose special tokens other than EoS.
    """
    vocab_size = len(lm.prompt_token_ids)
    for k in ks:
        if not 1 <= k <= vocab_size:
            raise InputError(
                f"Expected `k` to hold ranks from 1 to {vocab_size} (the vocabulary of {lm.name}), "
                f"but got {k}."
            )
    jobs = [(k, sample) for k in ks for sample in range(per_k)]
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
        ranks = np.array([k for k, _ in waiting])[:, None] + sigma * draws
        ranks = np.clip(np.rint(ranks), 1, vocab_size).astype(int)
        walks = _walk(lm, ranks, exclude_special)
        # All walks run as one batch, each from its own draws. The first that ends early shifts the
        # stream for those after it, so these are walked again.
        for (k, sample), (ids, probabilities), row in zip(waiting, walks, ranks, strict=True):
            ended_early = lm.eos_id in ids
            used = ids.index(lm.eos_id) + 1 if lm.eos_id is not None and ended_early else length
            start += used
            kept = ids[:used]
            if eos == "pad" and lm.eos_id is not None:
                kept = kept + [lm.eos_id] * (length - used)
            elif ended_early:
                kept = kept[:-1]
            if kept:
                log_probs = np.log(probabilities[:used])
                targets.append(
                    Target(
                        id=f"k{k}_sample{sample}",
                        ids=tuple(kept),
                        text=lm.decode(kept),
                        k=k,
                        ranks=tuple(int(r) for r in row[:used]),
                        probabilities=tuple(probabilities[:used]),
                        perplexity=float(np.exp(-log_probs.mean())),
                    )
                )
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


def texts_to_targets(
    lm: FrozenLM, texts: Sequence[str], template: Template | None = None
) -> list[Target]:
    """One target per text, tokenised without special tokens, after a template if there is one."""
    return [
        _from_text(lm, text, f"text_{index}", f"`texts[{index}]`", template)
        for index, text in enumerate(texts)
    ]


def read_targets(lm: FrozenLM, path: Path, template: Template | None = None) -> list[Target]:
    """Targets of a file: JSONL with `ids` or `text` in each line, or plain text, one a line.

    Further names in a line of JSONL are the fields that a template asks for.
    """
    is_jsonl = path.suffix in (".jsonl", ".json")
    targets = []
    try:
        for number, line in read_lines(path):
            where = f"`targets_file` {path}, line {number}"
            # Editors on Windows open a file with a mark and end its lines with a return.
            line = line.removeprefix(codecs.BOM_UTF8).removesuffix(b"\r")
            read = _from_json_line if is_jsonl else _from_text_line
            targets.append(read(lm, line, f"line_{number}", where, template))
    except OSError as error:
        raise InputError(
            f"Expected `targets_file` to be a readable file, but got {path} ({error})."
        ) from error
    if not targets:
        raise InputError(
            f"Expected `targets_file` to hold at least one target, but {path} is empty. "
            "Write some with `python -m dlmi targets --out FILE`."
        )
    return targets


def write_targets(path: Path, targets: Iterable[Target]) -> None:
    """One JSON line per target; `read_targets` gives them back bit for bit."""
    lines = (json.dumps(target.to_json(), ensure_ascii=False) + "\n" for target in targets)
    with path.open("x", encoding="utf-8") as file:
        file.writelines(lines)


def _from_json_line(
    lm: FrozenLM, line: bytes, default_id: str, where: str, template: Template | None
) -> Target:
    def fail(expected: str, got: object) -> InputError:
        return InputError(f"Expected {where} to {expected}, but got {str(got)[:80]!r}.")

    try:
        row = {"id": default_id, **parse_object(line)}
        if not ("ids" in row or "text" in row):
            raise InputError("it has neither")
    except InputError as error:
        expected = "to be a JSON object with `ids` or `text`"
        raise InputError(f"Expected {where} {expected}, but {error}.") from error
    ids = row.get("ids", [])
    if "ids" in row and not (ids and isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise fail("have a non-empty list of token ids as `ids`", ids)
    try:
        # Without a text it is that of the ids, and the other way round, once both are known good.
        target = Target.from_json({"text": "", **row, "ids": ids})
    except InputError as error:
        raise InputError(f"Expected {where} to be a target, but {error}.") from error
    if not target.id:
        raise fail("have a name as `id`", target.id)
    if "ids" not in row:
        made = _from_text(lm, target.text, target.id, where, template, row)
        return dataclasses.replace(made, k=target.k)
    lm.check_ids([*ids, *(i for e in target.all_readings for i in e.frame.given_ids)], where)
    if template is not None:
        target = dataclasses.replace(target, frame=template.fill(lm, row, where).frame)
    return target if "text" in row else dataclasses.replace(target, text=lm.decode(ids))


def _from_text_line(
    lm: FrozenLM, line: bytes, target_id: str, where: str, template: Template | None
) -> Target:
    try:
        return _from_text(lm, line.decode("utf-8"), target_id, where, template)
    except UnicodeDecodeError as error:
        raise InputError(f"Expected {where} to be UTF-8, but it is not ({error}).") from error


def _from_text(
    lm: FrozenLM,
    text: str,
    target_id: str,
    where: str,
    template: Template | None,
    fields: Mapping[str, Any] | None = None,
) -> Target:
    filled = None if template is None else template.fill(lm, fields or {}, where)
    ids: Sequence[int] = ()
    if text.strip():
        ids = lm.encode(text) if filled is None else filled.continuation_ids(lm, text, where)
    if not ids:
        raise InputError(
            f"Expected {where} to be a text of at least one token, but got {text!r}. Leave it out."
        )
    lm.check_ids(ids, where)
    frame = NO_FRAME if filled is None else filled.frame
    return Target(id=target_id, ids=tuple(ids), text=text, frame=frame)


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
