"""The attention of every query of a prompt, summed: what H2O and Keyformer rank by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvsieve.policies.evidence import Chunk, Evidence


@dataclass(frozen=True)
class AttentionSums:
    """Accumulator of softmax weights (`policies.Accumulator`).

    Its state is [num_kv_heads, prompt_tokens] float32: summed over all queries so far and over
    the heads of a group.

    Attributes:
        temperature: What logits are divided by before the softmax.
        noise: Gives [num_kv_heads, num_queries_per_kv, first + num_queries] to add to a chunk's
            scaled logits; None for nothing.
    """

    temperature: float = 1.0
    noise: Callable[[Chunk], torch.Tensor] | None = None

    def start(self, chunk: Chunk) -> torch.Tensor:
        """Zeros."""
        shape = (chunk.num_kv_heads, chunk.prompt_tokens)
        return torch.zeros(shape, dtype=torch.float32, device=chunk.queries().device)

    def add(self, state: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Add a chunk's weights, in place."""
        noise = None if self.noise is None else self.noise(chunk)
        sums = chunk.attention_sums(noise=noise, temperature=self.temperature)
        state[:, : sums.shape[1]] += sums
        return state

    def num_bytes(self, num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int) -> int:
        """Four per KV head and token."""
        return 4 * num_kv_heads * num_tokens


def accumulated_attention(evidence: Evidence) -> torch.Tensor:
    """What `AttentionSums` gathered: [num_kv_heads, 1, n] float32."""
    sums: torch.Tensor = evidence.accumulated()
    return sums.unsqueeze(1)
