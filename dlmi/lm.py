"""A frozen causal language model, seen the way inversion needs it.

A prompt goes in as embeddings, soft or hard. Out come the logits at the M positions that predict
the target, either with the target's own prefix fed in (`target_logits`, teacher forcing) or with
the model's own greedy tokens fed back (`free_run`). Nothing here ever changes a weight.

Axes in shape comments: R rows of a batch, N prompt tokens, M target tokens, V logits of the LM,
d embedding width.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlmi.errors import InputError

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
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.embedding_matrix = self._read_embedding_matrix()  # (rows, d)
        rows = self.embedding_matrix.shape[0]
        known_ids = sorted({i for i in tokenizer.get_vocab().values() if i < rows})
        # The ids a prompt may hold: rows that no token uses never get a column in Z.
        self.prompt_token_ids = torch.tensor(known_ids)
        self.prompt_embedding_matrix = (
            self.embedding_matrix
            if known_ids == list(range(rows))
            else self.embedding_matrix[self.prompt_token_ids.to(self.device)]
        )
        self._check_interface()

    @property
    def device(self) -> torch.device:
        """Where the embeddings live, and so where prompts are made."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The LM's own dtype."""
        return self.embedding_matrix.dtype

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
        if isinstance(self._bos, str):
            bos_id = self.tokenizer.get_vocab().get(self._bos)
            if bos_id is None:
                raise InputError(
                    f"Expected `bos` to be a token of {self.name}, but got {self._bos!r}. "
                    "Give the token's exact text or its id."
                )
            return int(bos_id)
        for candidate in (self._bos, self.tokenizer.bos_token_id, self.eos_id):
            if candidate is not None:
                self.check_ids([candidate], "`bos`")
                return int(candidate)
        raise InputError(
            f"The tokenizer of {self.name} has neither BoS nor EoS, so there is nothing to start "
            "a target from. Name a token with `bos`, or give targets as `texts`."
        )

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

    def target_logits(self, prompt_embeds: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher forcing: the logits that predict each target token after its true prefix.

        Args:
            prompt_embeds: (R, N, d).
            target_ids: (R, M). Rows may be padded on the right with any id: a causal LM's earlier
                logits do not see it.

        Returns:
            (R, M, V), in float32 or better.
        """
        target_length = target_ids.shape[1]
        prefix_embeds = self.embed(target_ids[:, :-1])
        inputs_embeds = torch.cat([prompt_embeds.to(self.dtype), prefix_embeds], dim=1)
        logits, _ = self._forward(inputs_embeds, keep=target_length)
        return logits

    def free_run(
        self, prompt_embeds: Tensor, num_tokens: int, next_embeds: NextEmbeds | None = None
    ) -> Tensor:
        """Decode exactly `num_tokens` tokens and give the logits of each step; EoS ends nothing.

        With gradients enabled they reach the prompt through the KV cache. Greedily chosen tokens
        are looked up, so no gradient passes through their choice.

        Args:
            prompt_embeds: (R, N, d).
            num_tokens: How many tokens to decode.
            next_embeds: As in `decode_steps`.

        Returns:
            (R, num_tokens, V), in float32 or better.
        """
        return torch.cat(list(self.decode_steps(prompt_embeds, num_tokens, next_embeds)), dim=1)

    @torch.no_grad()
    def greedy(self, prompt_ids: Tensor, num_tokens: int) -> Tensor:
        """What the LM says to a discrete prompt: (R, N) ids to (R, num_tokens) ids."""
        steps = self.decode_steps(self.embed(prompt_ids), num_tokens)
        return torch.cat([logits.argmax(-1) for logits in steps], dim=1)

    def decode_steps(
        self, prompt_embeds: Tensor, num_tokens: int, next_embeds: NextEmbeds | None = None
    ) -> Iterator[Tensor]:
        """Decode token by token with a KV cache, yielding each step's logits, (R, 1, V).

        Args:
            prompt_embeds: (R, N, d).
            num_tokens: How many tokens to decode.
            next_embeds: Maps a step's logits (R, 1, V) and its index to what is read next,
                (R, 1, d). Default: the embedding of the argmax.
        """
        inputs_embeds = prompt_embeds.to(self.dtype)
        cache = None
        for step in range(num_tokens):
            logits, cache = self._forward(inputs_embeds, keep=1, cache=cache, use_cache=True)
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
        return float(log_probs.mean().neg().exp())

    @contextlib.contextmanager
    def scaled_norm_gradients(self, factor: float) -> Iterator[None]:
        """Scale gradients where they leave a norm layer, for passes made inside this context.

        The forward pass is untouched. Inside a block the norm stands at the start of a branch, so
        a factor below 1 weakens what comes through the branches against the residual stream.
        """

        def scale(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

        norms = [m for m in self.model.modules() if type(m).__name__.endswith("Norm")]
        handles = [norm.register_forward_hook(scale) for norm in norms]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def fingerprint(self) -> str:
        """A short hash over the head of every weight: tells models apart, costs no time."""
        digest = hashlib.sha256()
        for name, weight in self.model.named_parameters():
            head = weight.detach().flatten()[:256].float().cpu().numpy().tobytes()
            digest.update(f"{name}{tuple(weight.shape)}".encode() + head)
        return digest.hexdigest()[:16]

    def _forward(
        self, inputs_embeds: Tensor, keep: int, cache: Any = None, use_cache: bool = False
    ) -> tuple[Tensor, Any]:
        """One pass; the LM head runs on the last `keep` positions only, where the LM allows it."""
        kwargs: dict[str, Any] = {"use_cache": use_cache, "past_key_values": cache}
        if self._keeps_logits:
            kwargs["logits_to_keep"] = keep
        output = self.model(inputs_embeds=inputs_embeds, **kwargs)
        logits = output.logits[:, -keep:]
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return logits, getattr(output, "past_key_values", None)

    def _read_embedding_matrix(self) -> Tensor:
        """The vectors that the LM reads for each id, whatever its embedding module does to them."""
        module = self.model.get_input_embeddings()
        if type(module) is nn.Embedding:
            weight: Tensor = module.weight.detach()
            return weight
        # Gemma and others scale inside the embedding module, so ask the module, not its weight.
        with torch.no_grad():
            rows = torch.arange(module.weight.shape[0], device=module.weight.device)
            vectors: Tensor = module(rows)
        return vectors

    @torch.no_grad()
    def _check_interface(self) -> None:
        """Refuse by name what cannot be inverted: no soft prompts, or not causal."""
        this = f"{self.name} ({type(self.model).__name__})"
        if "inputs_embeds" not in inspect.signature(self.model.forward).parameters:
            raise InputError(
                f"{this} does not accept `inputs_embeds`, so a soft prompt cannot be fed to it. "
                "Choose another model."
            )
        ids = self.prompt_token_ids[torch.linspace(0, len(self.prompt_token_ids) - 1, 4).long()]
        ids = ids[None].to(self.device)
        by_ids = self.model(input_ids=ids, use_cache=False).logits.float()
        by_embeds = self.model(inputs_embeds=self.embed(ids), use_cache=False).logits.float()
        scale = by_ids.abs().max().clamp_min(1e-6)
        if (by_ids - by_embeds).abs().max() > 0.02 * scale:
            raise InputError(
                f"{this} answers differently to token ids and to their embeddings, so a soft "
                "prompt would mean something else. Choose another model."
            )
        other_ids = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
        by_other = self.model(input_ids=other_ids, use_cache=False).logits.float()
        if (by_ids - by_other)[:, :-1].abs().max() > 0.02 * scale:
            raise InputError(
                f"{this} is not causal: a later token changes an earlier prediction, as in encoder "
                "models. Choose a decoder LM."
            )
