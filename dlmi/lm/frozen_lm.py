"""A frozen causal language model, with the passes that inversion needs.

A prompt goes in as embeddings, soft or hard. Out come the logits at the M positions that predict
the target, with the target's own tokens as inputs (`target_logits`, teacher forcing) or the model's
own greedy tokens (`free_run`). Fixed tokens before the prompt are a `Prefix`, whose keys and values
are computed once. No weight is ever changed.

Axes: R rows of a batch, N prompt tokens, M target tokens, V logits of the LM, d embedding width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlmi.errors import InputError
from dlmi.lm import generation
from dlmi.lm.forward import Forward, check_invertible, read_embedding_matrix
from dlmi.lm.memory import RowsPerPass
from dlmi.lm.packed import PackedLayout, PackedPass, packed_attention, packs_right
from dlmi.lm.placement import fingerprint, quantized_bits
from dlmi.lm.precision import PassPrecision
from dlmi.lm.prefix import Layers, Prefix, make_cache, read_layers
from dlmi.lm.products import use_packed_products
from dlmi.metrics import perplexity

# Maps the logits of a decoding step, (R, 1, V), and its index to the next input, (R, 1, d).
NextEmbeds = Callable[[Tensor, int], Tensor]


class FrozenLM:
    """A `transformers` causal LM with its tokenizer, frozen, and checked to be invertible.

    Args:
        model: Any causal LM of `transformers` that accepts `inputs_embeds`.
        tokenizer: Its tokenizer.
        name: Its name in result rows.
        revision: Commit, package version or file hash, if known.
        bos: The token that targets are generated from and that may stand before a prompt, as text
            or id. Default: the tokenizer's BoS, else its EoS.
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
        self.bos = bos
        # How many tokens it can read, if its config says so
        self.max_positions: int | None = getattr(model.config, "max_position_embeddings", None)
        # Whether its layers are on several devices or offloaded: it has a hook of accelerate's
        self.is_spread = getattr(model, "_hf_hook", None) is not None
        self.rows_per_pass = RowsPerPass()  # splits passes that do not fit into memory
        self.precision = PassPrecision()
        self.compile_passes = False  # those with a gradient
        self.copies: dict[torch.dtype, FrozenLM] = {}  # weights in other dtypes (`pass_dtype`)
        self.embedding_matrix = read_embedding_matrix(model)  # (rows, d)
        self.device = self.embedding_matrix.device  # where prompts are made
        self.dtype = self.embedding_matrix.dtype  # of its computations; weights may be quantised
        bits = quantized_bits(model.config)
        # In result rows: `float32`, or `float16+int8` for weights in 8 bits
        self.dtype_name = str(self.dtype).removeprefix("torch.") + (f"+{bits}" if bits else "")
        known_ids = {i for i in tokenizer.get_vocab().values() if i < len(self.embedding_matrix)}
        # What a prompt may hold: rows of unused ids are left out
        self.prompt_token_ids = torch.tensor(sorted(known_ids))
        self.end_ids = generation.replace_config(model, self.eos_id)  # each ends a text of the LM
        check_invertible(model, name, self._some_ids(4)[None], self.embedding_matrix)
        use_packed_products(model)
        self._run = Forward(model, self.precision)

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"FrozenLM({self.name!r}, {kind}, {self.dtype_name}, {self.device})"

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def bos_id(self) -> int:
        """The token that stands before a text: the override, else BoS, else EoS."""
        bos_id = self.tokenizer.bos_token_id
        if self.bos is not None:
            bos_id = self.tokenizer.get_vocab().get(self.bos, self.bos)
        elif bos_id is None:
            bos_id = self.eos_id
        if bos_id is None:
            raise InputError(
                f"The tokenizer of {self.name} has neither BoS nor EoS, so there is nothing to "
                "start a target from. Name a token with `bos`, or give targets as `texts`."
            )
        if isinstance(bos_id, str):
            raise InputError(
                f"Expected `bos` to be a token of {self.name} (its exact text or its id), but got "
                f"{bos_id!r}."
            )
        self.check_ids([bos_id], "`bos`")
        return int(bos_id)

    @functools.cached_property
    def can_share(self) -> bool:
        """Whether keys and values of its cache can be shared and cut, tried on one token."""
        with torch.no_grad():
            _, cache = self._run(self.embed(self._some_ids(1))[None], 1, use_cache=True)
        self._run.takes_caches = read_layers(cache) is not None
        return self._run.takes_caches

    @functools.cached_property
    def can_pack(self) -> bool:
        """Whether rows of any lengths can be read in one pass (`dlmi.lm.packed`)."""
        can_try = self.can_share and not self.is_spread
        return can_try and packs_right(self, self.embed(self._some_ids(9)))

    @contextlib.contextmanager
    def not_compiled(self) -> Iterator[None]:
        """Run passes uncompiled: a compiled one hides its graph and skips hooks."""
        before, self.compile_passes = self.compile_passes, False
        try:
            yield
        finally:
            self.compile_passes = before

    def check_ids(self, ids: Sequence[int], what: str) -> None:
        """Raise `InputError` unless every id is one of this LM's."""
        last = len(self.embedding_matrix) - 1
        for token_id in ids:
            if not 0 <= token_id <= last:
                raise InputError(
                    f"Expected {what} to hold token ids of {self.name} (0 to {last}), but got "
                    f"{token_id}. Was it made for another model?"
                )

    def encode(self, text: str) -> list[int]:
        """Text to ids, without adding special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, keeping special tokens and spaces."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def embed(self, ids: Tensor) -> Tensor:
        """Ids to embeddings: (...) to (..., d)."""
        return F.embedding(ids, self.embedding_matrix)

    @torch.no_grad()
    def read_prefix(self, ids: Tensor, known: Prefix | None = None) -> Prefix:
        """Tokens, (L,), after a known prefix if there is one, with their keys and values.

        Only if `can_share`. In the LM's own dtype, without autocast: measurements may use them.
        """
        with self.precision.set_to(None):
            _, cache = self._run(self.embed(ids)[None], 1, known, use_cache=True)
        layers = read_layers(cache)
        assert layers is not None
        return Prefix(len(known or ()) + len(ids), layers)

    def target_logits(
        self, prompt_embeds: Tensor, target_ids: Tensor, prefix: Prefix | None = None
    ) -> Tensor:
        """Logits that predict each target token after the true ones before it (teacher forcing).

        (R, N, d) embeddings and (R, M) ids to (R, M, V), in float32 or better.
        """
        inputs_embeds = self._join(prompt_embeds, target_ids)
        return self.last_logits(inputs_embeds, target_ids.shape[1], prefix)

    def last_logits(self, inputs_embeds: Tensor, keep: int, prefix: Prefix | None = None) -> Tensor:
        """Logits of the last positions of any input: (R, T, d) to (R, keep, V)."""
        return self._run(inputs_embeds, keep, prefix, is_compiled=self.compile_passes)[0]

    def gives_up_compiling(self, error: Exception) -> bool:
        """Whether an error in a backward pass has ended compiling: then it can be made again."""
        return self.compile_passes and self._run.gives_up_compiling(error)

    def packed_logits(
        self,
        inputs_embeds: Tensor,
        layout: PackedLayout,
        prefixes: Sequence[Prefix] = (),
        captures: bool = False,
    ) -> tuple[Tensor, list[Layers]]:
        """Logits of rows of any lengths, concatenated, (L, d) to (.., V), if `can_pack`.

        With `captures`, also the keys and values of each row.
        """
        now = PackedPass(layout, [prefix.layers for prefix in prefixes], captures)
        inputs_embeds = inputs_embeds.to(self.dtype)
        if padding := layout.tokens - len(inputs_embeds):
            inputs_embeds = F.pad(inputs_embeds, (0, 0, 0, padding))
        with self.precision.around_pass(self.device.type), packed_attention(self.model, now):
            logits: Tensor = self.model(
                inputs_embeds=inputs_embeds[None],
                position_ids=now.position_ids,
                use_cache=False,
                logits_to_keep=now.kept,
            ).logits[0, : layout.num_kept]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), now.captured()

    def free_run(
        self,
        prompt_embeds: Tensor,
        num_tokens: int,
        next_embeds: NextEmbeds | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:
        """Decode M tokens, past EoS too: (R, N, d) to the logits of each step, (R, M, V).

        The input after a step is the embedding of the argmax, unless `next_embeds` gives another.
        Gradients reach the prompt through the KV cache, but not through the choice of a token.
        """
        return torch.cat(list(self._decode(prompt_embeds, num_tokens, next_embeds, prefix)), dim=1)

    @torch.no_grad()
    def greedy(
        self, prompt_ids: Tensor, num_tokens: int, prefix: Prefix | None = None, cache: Any = None
    ) -> Tensor:
        """Greedy output for a discrete prompt: (R, N) ids to (R, num_tokens) ids."""
        steps = self._decode(self.embed(prompt_ids), num_tokens, prefix=prefix, cache=cache)
        return torch.cat([logits.argmax(-1) for logits in steps], dim=1)

    @torch.no_grad()
    def forced_and_greedy(
        self, prompt_embeds: Tensor, target_ids: Tensor, prefix: Prefix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of teacher forcing, (R, M, V), and ids of a free greedy run, (R, M).

        Both agree up to the first token that teacher forcing gets wrong, so the free run starts
        there, from the keys and values of the forced one.
        """
        length = target_ids.shape[1]
        inputs_embeds = self._join(prompt_embeds, target_ids)
        logits, cache = self._run(inputs_embeds, length, prefix, use_cache=True)
        output_ids = logits.argmax(-1)
        # The number of right tokens before the first mistake of any row.
        right = int((output_ids == target_ids).cumprod(-1).sum(-1).min())
        if right >= length - 1:
            return logits, output_ids
        layers = read_layers(cache)
        if layers is None:
            return logits, self.free_run(prompt_embeds, length, prefix=prefix).argmax(-1)
        known = make_cache(layers, layers[0][0].shape[2] - (length - 1) + right)
        rest_ids = self.greedy(output_ids[:, right : right + 1], length - 1 - right, cache=known)
        return logits, torch.cat([output_ids[:, : right + 1], rest_ids], dim=1)

    generate = generation.generate

    @torch.no_grad()
    def token_log_probs(self, ids: Tensor) -> Tensor:
        """Log-probability of each token given those before it: (R, L) ids to (R, L-1)."""
        logits = self.last_logits(self.embed(ids[:, :-1]), keep=ids.shape[1] - 1)
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def perplexity(self, ids: Sequence[int]) -> float | None:
        """Perplexity of tokens 2..L; None for a single token."""
        if len(ids) < 2:
            return None
        log_probs = self.token_log_probs(torch.tensor([list(ids)], device=self.device))
        return perplexity(log_probs[0].tolist())

    def fingerprint(self) -> str:
        """A short hash over the first values of every weight."""
        return fingerprint(self.model)

    def _some_ids(self, count: int) -> Tensor:
        places = torch.linspace(0, len(self.prompt_token_ids) - 1, count).long()
        return self.prompt_token_ids[places].to(self.device)

    def _join(self, prompt_embeds: Tensor, target_ids: Tensor) -> Tensor:
        """Prompt and all of the target but its last token, (R, N+M-1, d)."""
        return torch.cat([prompt_embeds.to(self.dtype), self.embed(target_ids[:, :-1])], dim=1)

    def _decode(
        self,
        inputs_embeds: Tensor,
        num_tokens: int,
        next_embeds: NextEmbeds | None = None,
        prefix: Prefix | None = None,
        cache: Any = None,
    ) -> Iterator[Tensor]:
        """Decode token by token after a prefix or a cache; yields logits, (R, 1, V)."""
        choose = next_embeds or (lambda logits, step: self.embed(logits.argmax(dim=-1)))
        for step in range(num_tokens):
            inputs_embeds = inputs_embeds.to(self.dtype)
            logits, cache = self._run(inputs_embeds, 1, prefix, cache, use_cache=True)
            prefix = None  # now in the cache
            yield logits
            if step + 1 < num_tokens:
                inputs_embeds = choose(logits, step)
