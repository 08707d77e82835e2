"""Evidence: what a policy may look at, of one prompt in one layer.

Everything is computed when a policy asks for it, by whoever owns the tensors: the engine from
a paged cache, an inspection or a test from dense ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch


@dataclass(frozen=True)
class Rotary:
    """A layer's rotary embedding.

    Attributes:
        cos_sin: [num_positions, rotary_dim] of a floating-point type: the cosines of all
            frequencies, then the sines, per position (vLLM's `cos_sin_cache`).
        is_neox: Whether a pair is (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
    """

    cos_sin: torch.Tensor
    is_neox: bool


class Evidence(Protocol):
    """One prompt in one layer, once all of it was read.

    Queries and keys carry their rotary embedding. `n` is `num_tokens`, `w` the observation
    window (`min(observation_window, n)` queries).
    """

    num_tokens: int
    num_kv_heads: int
    layer: int
    """The layer's number in the model, from 0."""

    def window_attention(self, power: Literal[1, 2] = 1) -> torch.Tensor:
        """Softmax weights ** power, summed over the window's queries.

        The denominator covers all keys that a query sees. [num_kv_heads, num_queries_per_kv, n]
        float32.
        """
        ...

    def grouped_window_mean(self) -> torch.Tensor:
        """R-KV's importance before pooling.

        The largest logit of a group, softmax over the keys before the window alone, mean over
        the window's queries. [num_kv_heads, n - w] float32.
        """
        ...

    def keys(self) -> torch.Tensor:
        """[num_kv_heads, n, head_size] float32."""
        ...

    def values(self) -> torch.Tensor:
        """[num_kv_heads, n, head_size] float32."""
        ...

    def key_redundancy(self) -> torch.Tensor:
        """[num_kv_heads, n] float32, how much a key repeats later ones (R-KV)."""
        ...

    def output_norms(self) -> torch.Tensor:
        """L1 norm of what a value adds to the hidden state (CriticalKV).

        Through the output projection of a query head, mean over the group. [num_kv_heads, n]
        float32.
        """
        ...

    def accumulated(self) -> Any:
        """What the policy's `Accumulator` gathered from all of the prompt's queries."""
        ...


class Chunk(Protocol):
    """Some consecutive queries of a prompt in one layer, with every key before them."""

    first: int
    """Position of the first query."""
    num_queries: int
    prompt_tokens: int
    num_kv_heads: int
    num_queries_per_kv: int
    rotary: Rotary | None

    def queries(self) -> torch.Tensor:
        """[num_queries, num_heads, head_size] in the model's type, rotary embedding applied."""
        ...

    def attention_sums(
        self, noise: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        """Softmax weights, summed over the chunk's queries and the heads of a group.

        Args:
            noise: [num_kv_heads, num_queries_per_kv or 1, first + num_queries], added to the
                scaled logits.
            temperature: What logits and noise are divided by.

        Returns:
            [num_kv_heads, first + num_queries] float32.
        """
        ...


class Accumulator(Protocol):
    """What a policy gathers from every query of a prompt, chunk by chunk.

    A policy with one reads no prefix cache: the queries of a hit are never computed.
    """

    def start(self, chunk: Chunk) -> Any:
        """The state before the first query of a prompt; `chunk` is its first one."""
        ...

    def add(self, state: Any, chunk: Chunk) -> Any:
        """The state after a chunk; the old one may be changed and must not be used again."""
        ...

    def num_bytes(self, num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int) -> int:
        """Bytes of one prompt's state in one layer."""
        ...
