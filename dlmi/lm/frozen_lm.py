"""A frozen causal language model, seen the way inversion needs it.

A prompt goes in as embeddings, soft or hard. Out come the logits at the M positions that predict
the target, with the target's own tokens fed in (`target_logits`, teacher forcing) or the model's
own greedy tokens (`free_run`). Fixed tokens before the prompt are a `Prefix`, whose keys and values
are computed once. Nothing here ever changes a weight.

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
from dlmi.lm import checks, generation
from dlmi.lm.forward import Forward
from dlmi.lm.memory import RowsPerPass
from dlmi.lm.packed import PackedPass, PackedRow, packs_right
from dlmi.lm.placement import dtype_name, fingerprint
from dlmi.lm.precision import PassPrecision
from dlmi.lm.prefix import Layers, Prefix, make_cache, read_layers
from dlmi.metrics import perplexity

# Maps the logits of a decoding step, (R, 1, V), and its index to the next input, (R, 1, d).
NextEmbeds = Callable[[Tensor, int], Tensor]


class FrozenLM:
    """A `transformers` causal LM with its tokenizer, frozen, and checked to be invertible.

    Args:
        model: Any causal LM of `transformers` that accepts `inputs_embeds`.
        tokenizer: Its tokenizer.
        name: How result rows call it.
        revision: Commit, package version or file hash, where one is known.
        bos: The token that targets are generated from and that may stand before a prompt, as text
            or id. Default: the tokenizer's BoS, else its EoS.

    Attributes:
        rows_per_pass: Cuts passes over many rows to what fits into memory.
        precision: What its passes run in, where that is not its own dtype.
        compile_passes: Whether passes that gradients go through are compiled.
        copies: Itself with weights of other dtypes (`dlmi.lm.pass_dtype`).
        end_ids: Tokens that end a text of the LM.
        embedding_matrix: What the LM reads for each id, (rows, d).
        prompt_token_ids: The ids a prompt may hold: rows that no token uses are left out.
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
        self.rows_per_pass = RowsPerPass()
        self.precision = PassPrecision()
        self.compile_passes = False
        self.copies: dict[torch.dtype, FrozenLM] = {}
        self._run = Forward(model, self.precision)
        self.embedding_matrix = checks.read_embedding_matrix(model)
        known_ids = {i for i in tokenizer.get_vocab().values() if i < len(self.embedding_matrix)}
        self.prompt_token_ids = torch.tensor(sorted(known_ids))
        self.end_ids = generation.replace_config(model, self.eos_id)
        checks.check_invertible(model, name, self._some_ids(4)[None], self.embedding_matrix)
        checks.gather_head_input(model)

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"FrozenLM({self.name!r}, {kind}, {self.dtype_name}, {self.device})"

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
        return getattr(self.model, "_hf_hook", None) is not None  # accelerate's

    @property
    def devices(self) -> list[torch.device]:
        """All devices that hold its weights; what is offloaded is computed on one of them."""
        found = {p.device for p in self.model.parameters() if p.device.type != "meta"}
        return sorted(found, key=str)

    @property
    def max_positions(self) -> int | None:
        """How many tokens the LM can read, where its config says so."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def bos_id(self) -> int:
        """The token that stands before a text: the override, else BoS, else EoS."""
        bos_id = checks.find_bos_id(self.tokenizer, self.bos, self.name)
        self.check_ids([bos_id], "`bos`")
        return bos_id

    @functools.cached_property
    def can_share(self) -> bool:
        """Whether it has keys and values that can be kept, shared and cut; one token tells."""
        return self.read_prefix(self.prompt_token_ids[:1].to(self.device)).layers is not None

    @functools.cached_property
    def can_pack(self) -> bool:
        """Whether rows of any lengths can be read in one pass (`dlmi.lm.packed`)."""
        if self.is_spread or not self.can_share:
            return False
        some = self.embed(self._some_ids(9))
        return packs_right(some, self.packed_logits, self.last_logits)

    @contextlib.contextmanager
    def not_compiled(self) -> Iterator[None]:
        """Within, passes run as they are: a compiled one hides its graph and leaves out hooks."""
        before, self.compile_passes = self.compile_passes, False
        try:
            yield
        finally:
            self.compile_passes = before

    def check_ids(self, ids: Sequence[int], what: str) -> None:
        """Raise `InputError` unless every id is a token that this LM can read and write."""
        rows = len(self.embedding_matrix)
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

    @torch.no_grad()
    def read_prefix(self, ids: Tensor, known: Prefix | None = None) -> Prefix:
        """Tokens (L,), after a known prefix if there is one, with their keys and values.

        These are in the LM's own dtype: they may be kept for measurements, which autocast must not
        touch.
        """
        with self.precision.set_to(None):
            _, cache = self._forward(self.embed(ids)[None], keep=1, use_cache=True, prefix=known)
        all_ids = ids if known is None else torch.cat([known.ids, ids])
        return Prefix(all_ids, read_layers(cache))

    def target_logits(
        self, prompt_embeds: Tensor, target_ids: Tensor, prefix: Prefix | None = None
    ) -> Tensor:
        """Teacher forcing: the logits that predict each target token after the true ones before it.

        (R, N, d) embeddings and (R, M) ids to (R, M, V), in float32 or better.
        """
        inputs_embeds = self._join(prompt_embeds, target_ids)
        return self.last_logits(inputs_embeds, target_ids.shape[1], prefix)

    def last_logits(self, inputs_embeds: Tensor, keep: int, prefix: Prefix | None = None) -> Tensor:
        """Logits of the last positions of any input: (R, T, d) to (R, keep, V)."""
        return self._forward(inputs_embeds, keep, prefix=prefix)[0]

    def packed_logits(
        self,
        inputs_embeds: Tensor,
        rows: Sequence[PackedRow],
        prefixes: Sequence[Prefix] = (),
        captures: bool = False,
    ) -> tuple[Tensor, list[Layers]]:
        """Logits of rows of any lengths that lie one after the other, (L, d) to (.., V).

        Only where `can_pack`. With `captures`, the keys and values of each row as well.
        """
        layers = [prefix.layers for prefix in prefixes if prefix.layers is not None]
        now = PackedPass(rows, layers, self.device, captures)
        logits = self._run.packed(inputs_embeds.to(self.dtype), now)
        return logits, now.captured()

    def free_run(
        self,
        prompt_embeds: Tensor,
        num_tokens: int,
        next_embeds: NextEmbeds | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:
        """Decode M tokens, EoS or not: (R, N, d) to the logits of each step, (R, M, V).

        What is read after a step is the embedding of the argmax, unless `next_embeds` says
        otherwise. With gradients enabled they reach the prompt through the KV cache, but not
        through the choice of a token, which is looked up.
        """
        return torch.cat(list(self._decode(prompt_embeds, num_tokens, next_embeds, prefix)), dim=1)

    @torch.no_grad()
    def greedy(
        self, prompt_ids: Tensor, num_tokens: int, prefix: Prefix | None = None, cache: Any = None
    ) -> Tensor:
        """What the LM says to a discrete prompt: (R, N) ids to (R, num_tokens) ids."""
        steps = self._decode(self.embed(prompt_ids), num_tokens, prefix=prefix, cache=cache)
        return torch.cat([logits.argmax(-1) for logits in steps], dim=1)

    @torch.no_grad()
    def forced_and_greedy(
        self, prompt_embeds: Tensor, target_ids: Tensor, prefix: Prefix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Teacher forcing and a free greedy run, with what they share computed once.

        Both say the same up to the first token that teacher forcing gets wrong, so the free run
        starts there, from the keys and values of the forced one. (R, N, d) embeddings and (R, M)
        ids to forced logits, (R, M, V), and greedy ids, (R, M).
        """
        length = target_ids.shape[1]
        inputs_embeds = self._join(prompt_embeds, target_ids)
        logits, cache = self._forward(inputs_embeds, keep=length, use_cache=True, prefix=prefix)
        output_ids = logits.argmax(-1)
        # Per row the number of right tokens before the first mistake; the batch has its smallest.
        right = int((output_ids == target_ids).cumprod(-1).sum(-1).min())
        if right >= length - 1:
            return logits, output_ids
        layers = read_layers(cache)
        if layers is None:
            return logits, self.free_run(prompt_embeds, length, prefix=prefix).argmax(-1)
        known = make_cache(layers, layers[0][0].shape[2] - (length - 1) + right)
        rest_ids = self.greedy(output_ids[:, right : right + 1], length - 1 - right, cache=known)
        return logits, torch.cat([output_ids[:, : right + 1], rest_ids], dim=1)

    def generate(
        self,
        rows: Sequence[Sequence[int]],
        max_tokens: int,
        stop: str | None = None,
        batch_size: int = 16,
    ) -> list[list[int]]:
        """What the LM says greedily after each row of ids, without the token that ended it.

        Args:
            rows: Ids of each text, at least one each.
            max_tokens: Where to end at the latest.
            stop: A text whose appearance ends a row; the token that completes it is kept.
            batch_size: Rows side by side; sorted by length, so that few are padded.
        """
        generation.check_lengths(rows, max_tokens, self.max_positions, self.name)
        is_complete = None if stop is None else lambda ids: stop in self.decode(ids)
        # In the LM's own dtype, whatever autocast is on outside.
        with torch.autocast(self.device.type, enabled=False):
            return generation.generate(
                self.model, rows, max_tokens, self.end_ids, is_complete, batch_size
            )

    @torch.no_grad()
    def token_log_probs(self, ids: Tensor) -> Tensor:
        """Log-probability of each token given those before it: (R, L) ids to (R, L-1)."""
        logits = self.last_logits(self.embed(ids[:, :-1]), keep=ids.shape[1] - 1)
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def perplexity(self, ids: Sequence[int]) -> float | None:
        """Exp of the mean negative log-likelihood of tokens 2..L; None for a single token."""
        if len(ids) < 2:
            return None
        log_probs = self.token_log_probs(torch.tensor([list(ids)], device=self.device))
        return perplexity(log_probs[0].tolist())

    def fingerprint(self) -> str:
        """A short hash over the head of every weight: tells models apart, costs no time."""
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
        """Decode after a prefix or a cache, token by token, yielding logits, (R, 1, V)."""
        choose = next_embeds or (lambda logits, step: self.embed(logits.argmax(dim=-1)))
        for step in range(num_tokens):
            inputs_embeds = inputs_embeds.to(self.dtype)
            logits, cache = self._forward(inputs_embeds, 1, cache, use_cache=True, prefix=prefix)
            prefix = None  # now in the cache
            yield logits
            if step + 1 < num_tokens:
                inputs_embeds = choose(logits, step)

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
        return self._run(inputs_embeds, keep, cache, use_cache, self.compile_passes)
