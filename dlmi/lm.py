"""A frozen causal language model, seen the way inversion needs it.

A prompt goes in as embeddings, soft or hard. Out come the logits at the M positions that predict
the target, with the target's own prefix fed in (`target_logits`, teacher forcing) or the model's
own greedy tokens (`free_run`). Fixed tokens before the prompt are a `Prefix`, whose keys and values
are computed once. Nothing here ever changes a weight.

Axes in shape comments: R rows of a batch, N prompt tokens, M target tokens, V logits of the LM,
d embedding width.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlmi import interface
from dlmi.compiled import CompiledPass
from dlmi.errors import InputError
from dlmi.memory import RowsPerPass
from dlmi.metrics import perplexity
from dlmi.placement import dtype_name, fingerprint, is_spread, weight_devices
from dlmi.precision import PassPrecision
from dlmi.prefix import Prefix, make_cache, read_layers

_KEPT_PREFIXES = 32  # those used last; each holds keys and values of all its tokens

# Maps the logits of a decoding step, (R, 1, V), and its index to the next input, (R, 1, d).
NextEmbeds = Callable[[Tensor, int], Tensor]


class FrozenLM:
    """A `transformers` causal LM with its tokenizer, frozen, and checked to be invertible.

    Args:
        model: Any causal LM of `transformers` that accepts `inputs_embeds`.
        tokenizer: Its tokenizer.
        name: How result rows call it.
        revision: Commit, package version or file hash, where one is known.
        bos: The token that targets are generated from and that `prompt_bos` puts before a prompt,
            as text or id. Default: the tokenizer's BoS, else its EoS.

    Attributes:
        rows_per_pass: Cuts passes over many rows to what fits into memory.
        compiled: The pass that gradients go through, compiled where that pays.
        precision: What its passes run in, where that is not its own dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        name: str = "unnamed",
        revision: str | None = None,
        bos: str | int | None = None,
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self._bos = bos
        self.rows_per_pass = RowsPerPass()
        self.compiled = CompiledPass(self._run)
        self.precision = PassPrecision()
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.embedding_matrix = interface.read_embedding_matrix(model)  # (rows, d)
        rows = self.embedding_matrix.shape[0]
        known_ids = sorted({i for i in tokenizer.get_vocab().values() if i < rows})
        # The ids a prompt may hold: rows that no token uses never get a column in Z.
        self.prompt_token_ids = torch.tensor(known_ids)
        interface.check_invertible(self)
        interface.gather_head_input(model)

    @property
    def device(self) -> torch.device:
        """Where the embeddings live, and so where prompts are made."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the LM computes in, whatever its weights are kept in."""
        return self.embedding_matrix.dtype

    @property
    def dtype_name(self) -> str:
        """What rows say: `float32`, or `float16+int8` for weights in 8 bits."""
        return dtype_name(self.dtype, self.model.config)

    @property
    def is_spread(self) -> bool:
        """Whether its layers lie on several devices, or are brought in for each pass."""
        return is_spread(self.model)

    @property
    def devices(self) -> list[torch.device]:
        """All devices that hold its weights."""
        return weight_devices(self.model)

    @property
    def num_layers(self) -> int:
        """How many blocks it has; a dozen where its config does not say."""
        return int(getattr(self.model.config, "num_hidden_layers", 12))

    @property
    def max_positions(self) -> int | None:
        """How many tokens the LM can read, where its config says so."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        eos: int | None = self.tokenizer.eos_token_id
        return eos

    @property
    def bos_id(self) -> int:
        """The token that stands before a text: the override, else BoS, else EoS."""
        return interface.find_bos_id(self, self._bos)

    def check_ids(self, ids: Sequence[int], what: str) -> None:
        """Raise `InputError` unless every id is a token that this LM can read and write."""
        rows = self.embedding_matrix.shape[0]
        for token_id in ids:
            if not 0 <= token_id < rows:
                raise InputError(
                    f"Expected {what} to hold token ids of {self.name} (0 to {rows - 1}), "
                    f"but got {token_id}. Was it made for another model?"
                )

    def encode(self, text: str) -> list[int]:
        """Text to ids, with no special tokens added."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens and spaces kept, so that as much as possible encodes back."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def embed(self, ids: Tensor) -> Tensor:
        """Ids to embeddings by plain lookup: (...) to (..., d)."""
        return F.embedding(ids, self.embedding_matrix)

    def prefix(self, ids: Sequence[int]) -> Prefix:
        """Fixed tokens, with keys and values that are computed at the first call and kept."""
        key = tuple(ids)
        prefix = self._prefixes.pop(key, None)
        if prefix is None:
            prefix = self.read_prefix(torch.tensor(key, device=self.device))
        self._prefixes[key] = prefix  # a dictionary keeps its order: the one used last is last
        if len(self._prefixes) > _KEPT_PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]
        return prefix

    @torch.no_grad()
    def read_prefix(self, ids: Tensor, known: Prefix | None = None) -> Prefix:
        """Tokens (L,) with their keys and values, computed now, in the LM's own dtype.

        They may be kept for measurements, which autocast must not touch.

        Args:
            ids: The tokens.
            known: What stands before them, and becomes part of the prefix.
        """
        with self.precision.set_to(None):
            _, cache = self._forward(self.embed(ids)[None], keep=1, use_cache=True, prefix=known)
        all_ids = ids if known is None else torch.cat([known.ids, ids])
        return Prefix(all_ids, read_layers(cache))

    def target_logits(
        self, prompt_embeds: Tensor, target_ids: Tensor, prefix: Prefix | None = None
    ) -> Tensor:
        """Teacher forcing: the logits that predict each target token after its true prefix.

        Args:
            prompt_embeds: (R, N, d).
            target_ids: (R, M). Rows may be padded on the right with any id: a causal LM's earlier
                logits do not see it.
            prefix: Fixed tokens before the prompt.

        Returns:
            (R, M, V), in float32 or better.
        """
        inputs_embeds = self._join(prompt_embeds, target_ids)
        logits, _ = self._forward(inputs_embeds, keep=target_ids.shape[1], prefix=prefix)
        return logits

    def last_logits(self, inputs_embeds: Tensor, keep: int, prefix: Prefix | None = None) -> Tensor:
        """Logits of the last positions of any input: (R, T, d) to (R, keep, V)."""
        logits, _ = self._forward(inputs_embeds, keep, prefix=prefix)
        return logits

    def free_run(
        self,
        prompt_embeds: Tensor,
        num_tokens: int,
        next_embeds: NextEmbeds | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:
        """Decode exactly `num_tokens` tokens and give the logits of each step; EoS ends nothing.

        With gradients enabled they reach the prompt through the KV cache. Greedily chosen tokens
        are looked up, so no gradient passes through their choice.

        Args:
            prompt_embeds: (R, N, d).
            num_tokens: How many tokens to decode.
            next_embeds: As in `decode_steps`.
            prefix: Fixed tokens before the prompt.

        Returns:
            (R, num_tokens, V), in float32 or better.
        """
        steps = self.decode_steps(prompt_embeds, num_tokens, next_embeds, prefix)
        return torch.cat(list(steps), dim=1)

    @torch.no_grad()
    def greedy(self, prompt_ids: Tensor, num_tokens: int, prefix: Prefix | None = None) -> Tensor:
        """What the LM says to a discrete prompt: (R, N) ids to (R, num_tokens) ids."""
        steps = self.decode_steps(self.embed(prompt_ids), num_tokens, prefix=prefix)
        return torch.cat([logits.argmax(-1) for logits in steps], dim=1)

    @torch.no_grad()
    def forced_and_greedy(
        self, prompt_embeds: Tensor, target_ids: Tensor, prefix: Prefix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Teacher forcing and a free greedy run, with what they share computed once.

        Both say the same up to the first token that teacher forcing gets wrong, so the free run
        starts there, from the keys and values of the forced one.

        Args:
            prompt_embeds: (R, N, d), soft or hard.
            target_ids: (R, M).
            prefix: Fixed tokens before the prompt.

        Returns:
            Forced logits, (R, M, V), and greedy ids, (R, M).
        """
        length = target_ids.shape[1]
        inputs_embeds = self._join(prompt_embeds, target_ids)
        logits, cache = self._forward(inputs_embeds, keep=length, use_cache=True, prefix=prefix)
        output_ids = logits.argmax(-1)
        # Per row the length of its right beginning; the batch starts at the shortest.
        right = int((output_ids == target_ids).cumprod(-1).sum(-1).min())
        if right >= length - 1:
            return logits, output_ids
        layers = read_layers(cache)
        if layers is None:
            steps = self.decode_steps(prompt_embeds, length, prefix=prefix)
            return logits, torch.cat([step.argmax(-1) for step in steps], dim=1)
        known = layers[0][0].shape[2] - (length - 1) + right
        steps = self.decode_steps(
            self.embed(output_ids[:, right : right + 1]),
            length - 1 - right,
            cache=make_cache(layers, known),
        )
        rest_ids = [step.argmax(-1) for step in steps]
        return logits, torch.cat([output_ids[:, : right + 1], *rest_ids], dim=1)

    def decode_steps(
        self,
        inputs_embeds: Tensor,
        num_tokens: int,
        next_embeds: NextEmbeds | None = None,
        prefix: Prefix | None = None,
        cache: Any = None,
    ) -> Iterator[Tensor]:
        """Decode token by token with a KV cache, yielding each step's logits, (R, 1, V).

        Args:
            inputs_embeds: What is read first, (R, N, d).
            num_tokens: How many tokens to decode.
            next_embeds: Maps a step's logits (R, 1, V) and its index to what is read next,
                (R, 1, d). Default: the embedding of the argmax.
            prefix: Fixed tokens before the first input.
            cache: Or the cache of what stands before it.
        """
        inputs_embeds = inputs_embeds.to(self.dtype)
        for step in range(num_tokens):
            logits, cache = self._forward(inputs_embeds, 1, cache, use_cache=True, prefix=prefix)
            prefix = None  # now in the cache
            yield logits
            if step + 1 < num_tokens:
                if next_embeds is None:
                    inputs_embeds = self.embed(logits.argmax(dim=-1))
                else:
                    inputs_embeds = next_embeds(logits, step).to(self.dtype)

    @torch.no_grad()
    def token_log_probs(self, ids: Tensor) -> Tensor:
        """Log-probability of each token given those before it: (R, L) ids to (R, L-1)."""
        logits, _ = self._forward(self.embed(ids[:, :-1]), keep=ids.shape[1] - 1)
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def perplexity(self, ids: Sequence[int]) -> float | None:
        """Exp of the mean negative log-likelihood of tokens 2..L; None for a single token."""
        if len(ids) < 2:
            return None
        log_probs = self.token_log_probs(torch.tensor([list(ids)], device=self.device))
        return perplexity(log_probs)

    def fingerprint(self) -> str:
        """A short hash over the head of every weight: tells models apart, costs no time."""
        return fingerprint(self.model)

    def mixed_precision(self) -> AbstractContextManager[None]:
        """Within, the autocast that is on outside reaches the LM's passes and nothing else."""
        return self.precision.only_in_passes(self.device.type)

    def _join(self, prompt_embeds: Tensor, target_ids: Tensor) -> Tensor:
        """Prompt and all of the target but its last token, (R, N+M-1, d)."""
        return torch.cat([prompt_embeds.to(self.dtype), self.embed(target_ids[:, :-1])], dim=1)

    def _forward(
        self,
        inputs_embeds: Tensor,
        keep: int,
        cache: Any = None,
        use_cache: bool = False,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Any]:
        """One pass, after a prefix, or after a cache, or from the start."""
        rows = len(inputs_embeds)
        if prefix is not None:
            cache = prefix.cache(rows)
            if cache is None:
                prefix_embeds = self.embed(prefix.ids).expand(rows, -1, -1)
                inputs_embeds = torch.cat([prefix_embeds, inputs_embeds], dim=1)
        if cache is None and not use_cache and inputs_embeds.requires_grad:
            return self._bring_back(self.compiled(inputs_embeds, keep)), None
        output = self._call(inputs_embeds, keep, cache, use_cache or cache is not None)
        return self._bring_back(output.logits[:, -keep:]), getattr(output, "past_key_values", None)

    def _run(self, inputs_embeds: Tensor, keep: int) -> Tensor:
        logits: Tensor = self._call(inputs_embeds, keep, None, False).logits[:, -keep:]
        return logits

    def _call(self, inputs_embeds: Tensor, keep: int, cache: Any, use_cache: bool) -> Any:
        """The model; its head runs on the last `keep` positions only, where it allows that."""
        kwargs = {"logits_to_keep": keep} if self._keeps_logits else {}
        with self.precision.around_pass(self.device.type):
            return self.model(
                inputs_embeds=inputs_embeds, past_key_values=cache, use_cache=use_cache, **kwargs
            )

    def _bring_back(self, logits: Tensor) -> Tensor:
        """Logits where prompts are made (the head may lie elsewhere), in float32 or better."""
        return logits.to(self.device, torch.promote_types(logits.dtype, torch.float32))
