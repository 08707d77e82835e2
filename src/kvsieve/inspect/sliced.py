"""Causal attention in slices of queries, and where its mass went.

The whole matrix of a prompt of 100,000 tokens and 32 heads would be 1.2 TiB; a slice of it
is as large as it is set to be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SLICE_BYTES = 2**27
"""Attention weights that are held at once, in bytes; the softmax holds twice as many."""

CPU_SLICE_BYTES = 2**22
"""The same on a CPU, where what stays in its caches is three times as fast."""


@dataclass(frozen=True)
class LayerAttention:
    """Where the attention of one layer went, summed over two sets of queries.

    Attributes:
        layer: Number of the layer in the model.
        num_kv_heads: KV heads of the layer; query heads come in that many groups, in order.
        cached_numbers: Numbers that the layer caches per token: keys and values of all KV heads.
        window_mass: [num_heads, num_tokens] float32, softmax weight of each position, summed
            over the queries of the observation window (the last ones of the prompt).
        sampled_mass: [num_heads, num_tokens] float32, the same summed over queries that are
            spread evenly over the whole prompt.
        observation_window: Queries in the window.
        num_sampled: Queries in the sample.
    """

    layer: int
    num_kv_heads: int
    cached_numbers: int
    window_mass: torch.Tensor
    sampled_mass: torch.Tensor
    observation_window: int
    num_sampled: int

    @property
    def window_attention(self) -> torch.Tensor:
        """`window_mass` by KV head: [num_kv_heads, num_queries_per_kv, num_tokens] float32."""
        num_heads, num_tokens = self.window_mass.shape
        group = num_heads // self.num_kv_heads
        return self.window_mass.view(self.num_kv_heads, group, num_tokens)


@dataclass(frozen=True)
class LayerHeads:
    """What one layer attended with.

    Attributes:
        module: Its attention module.
        query: [num_heads, num_tokens, head_size], rotary embedding applied.
        key: [num_kv_heads, num_tokens, head_size], likewise.
        value: [num_kv_heads, num_tokens, value_size].
        scale: Softmax scale.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


def sampled_queries(num_tokens: int, num_queries: int) -> torch.Tensor:
    """Positions of `num_queries` queries spread evenly over a prompt, the last one included.

    Returns:
        [min(num_queries, num_tokens)] int64, ascending and unique.
    """
    num_queries = min(num_queries, num_tokens)
    return torch.arange(1, num_queries + 1) * num_tokens // num_queries - 1


def slice_bytes_for(device: torch.device) -> int:
    """Attention weights to hold at once on a device, in bytes."""
    return CPU_SLICE_BYTES if device.type == "cpu" else SLICE_BYTES


def rows_per_slice(num_heads: int, num_tokens: int, slice_bytes: int = SLICE_BYTES) -> int:
    """Queries whose weights over the whole prompt fit into `slice_bytes`, at least one."""
    return min(num_tokens, max(1, slice_bytes // (4 * num_heads * num_tokens)))


def sliced_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    layer: int,
    observation_window: int,
    sampled: torch.Tensor,
    sliding_window: int | None = None,
    slice_bytes: int = SLICE_BYTES,
) -> tuple[torch.Tensor, LayerAttention]:
    """Causal attention of a whole prompt, in float32, with the sums that inspection needs.

    Args:
        query: [num_heads, num_tokens, head_size], rotary embedding applied.
        key: [num_kv_heads, num_tokens, head_size], likewise.
        value: [num_kv_heads, num_tokens, value_size].
        scale: Softmax scale.
        layer: Number of the layer, passed through.
        observation_window: Last queries of the prompt, in tokens, at most `num_tokens`.
        sampled: Positions of the sampled queries, ascending, from `sampled_queries`.
        sliding_window: Keys that a query sees, itself included; None for all before it.
        slice_bytes: Bound on the weights held at once, in bytes.

    Returns:
        The output [num_heads, num_tokens, value_size] in the query's dtype, and the sums.
    """
    num_heads, num_tokens, _ = query.shape
    num_kv_heads = key.shape[0]
    keys, values = key.float(), value.float()
    output = query.new_empty(num_heads, num_tokens, value.shape[-1])
    window_mass = torch.zeros(num_heads, num_tokens, device=query.device)
    sampled_mass = torch.zeros_like(window_mass)
    is_sampled = torch.zeros(num_tokens, dtype=torch.bool)
    is_sampled[sampled] = True
    key_position = torch.arange(num_tokens, device=query.device)
    first_of_window = num_tokens - observation_window
    rows = rows_per_slice(num_heads, num_tokens, slice_bytes)
    for begin in range(0, num_tokens, rows):
        end = min(begin + rows, num_tokens)
        # Heads of a group share a key: [num_kv_heads, group * rows, head_size].
        grouped = query[:, begin:end].float().reshape(num_kv_heads, -1, query.shape[-1]) * scale
        logits = (grouped @ keys[:, :end].transpose(1, 2)).view(num_heads, end - begin, end)
        seen_by = key_position[begin:end, None]
        hidden = key_position[:end] > seen_by
        if sliding_window is not None:
            hidden |= key_position[:end] <= seen_by - sliding_window
        weights = logits.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
        del logits
        mixed = weights.view(num_kv_heads, -1, end) @ values[:, :end]
        output[:, begin:end] = mixed.view(num_heads, end - begin, -1).to(output.dtype)
        if end > first_of_window:
            in_window = weights[:, max(0, first_of_window - begin) :]
            window_mass[:, :end] += in_window.sum(dim=1)
        chosen = is_sampled[begin:end].nonzero()[:, 0]
        if len(chosen):
            sampled_mass[:, :end] += weights[:, chosen.to(weights.device)].sum(dim=1)
    return output, LayerAttention(
        layer=layer,
        num_kv_heads=num_kv_heads,
        cached_numbers=num_kv_heads * (key.shape[-1] + value.shape[-1]),
        window_mass=window_mass,
        sampled_mass=sampled_mass,
        observation_window=observation_window,
        num_sampled=len(sampled),
    )


def scratch_bytes(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_tokens: int,
    slice_bytes: int = SLICE_BYTES,
) -> int:
    """Bytes that `sliced_attention` holds at once beyond its arguments, at most.

    Args:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Size of a head of queries, keys and values.
        num_tokens: Length of the prompt.
        slice_bytes: As given to `sliced_attention`.
    """
    rows = rows_per_slice(num_heads, num_tokens, slice_bytes)
    weights = 4 * num_heads * rows * num_tokens
    # Logits and their softmax, the mask of positions, and (never beside the logits) a copy of
    # the sampled rows.
    in_slice = 2 * weights + 3 * rows * num_tokens
    of_rows = 4 * 4 * num_heads * rows * head_size
    whole = 4 * num_tokens * (2 * num_kv_heads * head_size + num_heads * (head_size + 2 + 2))
    return in_slice + of_rows + whole + 16 * num_tokens
