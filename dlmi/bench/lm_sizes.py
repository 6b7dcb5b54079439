"""The sizes of a step and of an LM, and what is arithmetic in them: operations and bytes.

`Sizes` is read from a `transformers` model, which may be on the `meta` device. The bytes of a graph
and the elementwise work are those of a Llama (two norms, rotary positions, grouped keys, a gated
MLP), run op by op.

Axes: N prompt tokens, M target tokens, S samples, V tokens a prompt may hold, slots side by side.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

FLOAT32 = 4  # bytes; Z, its gradient, its moments, softmax and loss, whatever the LM's dtype
_BLOCK_BYTES = 2**21  # of a soft embedding
_BLOCKS = 5  # entries, two words of noise, weights, product


@dataclass(frozen=True)
class Size:
    """What a step costs by.

    Attributes:
        N: Prompt tokens.
        M: Target tokens.
        S: Samples.
        V: Tokens that a prompt may hold; 0 for all.
        slots: Targets side by side.
    """

    N: int = 20
    M: int = 8
    S: int = 2
    V: int = 0
    slots: int = 1

    @property
    def rows(self) -> int:
        """Prompts in a pass."""
        return self.S * self.slots

    @property
    def tokens(self) -> int:
        """Tokens of one prompt and its target, without the target's last one."""
        return self.N + self.M - 1


@dataclass(frozen=True)
class Sizes:
    """Of an LM.

    Attributes:
        layers: How many blocks.
        width: Of the embeddings, d.
        query_width: Of all heads' queries together.
        key_width: Of all heads' keys together.
        heads: How many queries per token.
        mlp_width: Of the gated MLP.
        vocabulary: Rows of the embedding matrix.
        block_weights: Entries of all matrices in the blocks.
        parameters: Of the whole LM.
        weight_bytes: Bytes of a parameter.
    """

    layers: int
    width: int
    query_width: int
    key_width: int
    heads: int
    mlp_width: int
    vocabulary: int
    block_weights: int
    parameters: int
    weight_bytes: int

    @classmethod
    def of(cls, model: Any) -> "Sizes":
        """Of a causal LM of `transformers`; its weights are counted, never read."""
        config = model.config.get_text_config()
        heads = int(config.num_attention_heads)
        head_width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        embedding = model.get_input_embeddings().weight
        # Lookups cost nothing, the head is counted by itself.
        outside = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        outside.append(model.get_output_embeddings())
        not_in_blocks = {id(p) for module in outside for p in module.parameters()}
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in not_in_blocks]
        return cls(
            layers=int(config.num_hidden_layers),
            width=embedding.shape[1],
            query_width=heads * head_width,
            key_width=key_heads * head_width,
            heads=heads,
            mlp_width=int(getattr(config, "intermediate_size", None) or 4 * embedding.shape[1]),
            vocabulary=len(embedding),
            block_weights=sum(p.numel() for p in matrices),
            parameters=sum(p.numel() for p in model.parameters()),
            weight_bytes=embedding.element_size(),
        )

    @classmethod
    def of_config(cls, config: Any, dtype: torch.dtype) -> "Sizes":
        """Of a model that is described and nowhere loaded."""
        with torch.device("meta"):
            return cls.of(AutoModelForCausalLM.from_config(config, dtype=dtype))  # type: ignore[no-untyped-call]

    # ---- operations

    def pass_operations(self, rows: int, tokens: int, keep: int, before: int = 0) -> float:
        """Floating-point operations of a forward pass, logits at `keep` positions."""
        products = tokens * self.block_weights + keep * self.vocabulary * self.width
        return 2.0 * rows * products + self.attention_operations(rows, tokens, before)

    def attention_operations(self, rows: int, tokens: int, before: int = 0) -> float:
        """The share of attention: scores and their use, with every token, as fused kernels do."""
        return 4.0 * rows * tokens * (tokens + before) * self.query_width * self.layers

    def step_operations(self, size: Size) -> float:
        """Forward, backward to the embeddings, and the two products with E."""
        forward = self.pass_operations(size.rows, size.tokens, size.M)
        again = 1.5 * self.attention_operations(size.rows, size.tokens)  # 5 products after 2
        columns = size.V or self.vocabulary
        return 2 * forward + again + 4.0 * size.rows * size.N * columns * self.width

    @property
    def forward_accesses(self) -> int:
        """Numbers that a layer's elementwise operations read and write per token."""
        return 20 * self.width + 10 * (self.query_width + self.key_width) + 5 * self.mlp_width

    @property
    def backward_accesses(self) -> int:
        """The same on the way back."""
        return 55 * self.width + 16 * (self.query_width + self.key_width) + 9 * self.mlp_width

    # ---- memory

    @property
    def lm_bytes(self) -> int:
        """The weights."""
        return self.parameters * self.weight_bytes

    @property
    def graph_bytes_per_token(self) -> int:
        """What a token keeps for the backward pass; norms and sums of attention are float32."""
        norms = (2 * self.layers + 1) * (self.width + 1) + self.layers * self.heads
        head_width = self.query_width // self.heads
        kept = 2 * (self.query_width + self.key_width) + 3 * self.mlp_width
        wide = max(FLOAT32, self.weight_bytes)
        return norms * wide + (self.layers * kept + 2 * head_width) * self.weight_bytes

    def step_bytes(self, size: Size) -> int:
        """The most that a step adds to what is there: its pass or, after that, its blocks."""
        embeds_and_gradient = 2 * FLOAT32 * size.rows * size.N * self.width
        entries = FLOAT32 * size.N * (size.V or self.vocabulary)
        # The samples of a block are summed before they are added to the gradient of Z.
        sums = min(entries, _BLOCK_BYTES // size.S)
        blocks = _BLOCKS * _BLOCK_BYTES + sums + size.slots * entries
        return embeds_and_gradient + max(self.pass_bytes(size), blocks)

    def pass_bytes(self, size: Size) -> int:
        """The graph of a pass over all rows, its logits, their log-softmax and its gradient."""
        logits = 3 * FLOAT32 * size.M * self.vocabulary
        return size.rows * (size.tokens * self.graph_bytes_per_token + logits)

    def slot_bytes(self, size: Size, moments: int = 2) -> int:
        """Z, its gradient and its moments (two for Adam) of one slot."""
        return (2 + moments) * FLOAT32 * size.N * (size.V or self.vocabulary)

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Keys and values of an evaluation."""
        return 2 * rows * tokens * self.key_width * self.layers * self.weight_bytes
