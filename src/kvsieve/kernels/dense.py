"""Evidence from dense tensors, by the reference kernels: for inspection, search and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from kvsieve.kernels import reference


@dataclass
class DenseChunk:
    """Consecutive queries of a prompt with every key before them (`policies.Chunk`).

    Attributes:
        query: [num_queries, num_heads, head_size], rotary embedding applied.
        key: [num_kv_heads, first + num_queries, head_size], likewise.
        scale: Softmax scale.
        prompt_tokens: Length of the whole prompt, in tokens.
        rotary: The layer's rotary embedding, for who looks at it.
    """

    query: torch.Tensor
    key: torch.Tensor
    scale: float
    prompt_tokens: int
    rotary: Any = None

    @property
    def num_queries(self) -> int:
        """Queries of the chunk."""
        return self.query.shape[0]

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.key.shape[1] - self.num_queries

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.key.shape[0]

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key.shape[0]

    def queries(self) -> torch.Tensor:
        """The chunk's queries."""
        return self.query

    def attention_sums(
        self, noise: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        """Softmax weights summed over queries and group (`reference.attention_sums`)."""
        return reference.attention_sums(
            self.query, self.key, self.scale, noise=noise, temperature=temperature
        )


@dataclass
class DenseEvidence:
    """One prompt in one layer (`policies.Evidence`).

    Attributes:
        queries: [n, num_heads, head_size], of the whole prompt, rotary embedding applied; only
            the window's are looked at unless there is an accumulator.
        key: [num_kv_heads, n, head_size], rotary embedding applied.
        value: [num_kv_heads, n, head_size].
        observation_window: Last queries that are watched, in tokens.
        scale: Softmax scale.
        output_projection: [num_heads, head_size, hidden_size] float32, for who looks at it.
        rotary: The layer's rotary embedding, for who looks at it.
        accumulator: The policy's `Accumulator`, if it has one.
        chunk_size: Queries per chunk, in tokens; None for all at once.
        layer: Number of the layer in the model.
    """

    queries: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    observation_window: int
    scale: float
    output_projection: torch.Tensor | None = None
    rotary: Any = None
    accumulator: Any = None
    chunk_size: int | None = None
    layer: int = 0
    _window_attention: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.key.shape[0]

    @property
    def _window(self) -> torch.Tensor:
        return self.queries[-min(self.observation_window, self.num_tokens) :]

    def window_attention(self, power: int = 1) -> torch.Tensor:
        """Softmax weights ** power, summed over the window (`reference.window_scores`)."""
        if power not in self._window_attention:
            self._window_attention[power] = reference.window_scores(
                self._window, self.key, self.scale, power=power
            )
        return self._window_attention[power]

    def grouped_window_mean(self) -> torch.Tensor:
        """R-KV's importance before pooling (`reference.grouped_window_mean`)."""
        return reference.grouped_window_mean(self._window, self.key, self.scale)

    def keys(self) -> torch.Tensor:
        """Keys, float32."""
        return self.key.float()

    def values(self) -> torch.Tensor:
        """Values, float32."""
        return self.value.float()

    def key_redundancy(self) -> torch.Tensor:
        """R-KV's redundancy (`reference.key_redundancy`)."""
        return reference.key_redundancy(self.key)

    def output_norms(self) -> torch.Tensor:
        """CriticalKV's norms (`reference.output_norms`).

        Raises:
            ValueError: There is no output projection.
        """
        if self.output_projection is None:
            raise ValueError("the policy looks at the output projection, and none was given")
        return reference.output_norms(self.value, self.output_projection)

    @cached_property
    def _accumulated(self) -> Any:
        state = None
        size = self.chunk_size or self.num_tokens
        for first in range(0, self.num_tokens, size):
            end = min(first + size, self.num_tokens)
            chunk = DenseChunk(
                self.queries[first:end],
                self.key[:, :end],
                self.scale,
                self.num_tokens,
                self.rotary,
            )
            if state is None:
                state = self.accumulator.start(chunk)
            state = self.accumulator.add(state, chunk)
        return state

    def accumulated(self) -> Any:
        """What the accumulator gathered, chunk by chunk."""
        return self._accumulated
