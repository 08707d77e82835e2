"""Cached rows where they lie: pages and a block table, in any layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedRows:
    """Keys (or values) of one request in one layer of a paged cache.

    The strides of `pages` say how the cache is laid out, so one class covers vLLM's NHD and
    HND layouts, caches that hold keys beside values, and pages whose keys lie transposed:
    pass a permuted view.

    Args:
        pages: [num_blocks, block_size, num_kv_heads, head_size], any strides.
        blocks: [at least ceil(num_tokens / block_size)] int32 or int64, the request's
            physical blocks in order.
        num_tokens: Rows that the request has.

    Raises:
        ValueError: The block table is too short.
    """

    pages: torch.Tensor
    blocks: torch.Tensor
    num_tokens: int

    def __post_init__(self) -> None:
        needed = -(-self.num_tokens // self.pages.shape[1])
        if self.blocks.shape[0] < needed:
            raise ValueError(
                f"{self.num_tokens} tokens need {needed} blocks of {self.pages.shape[1]};"
                f" the block table has {self.blocks.shape[0]}"
            )

    def dense(self) -> torch.Tensor:
        """A copy of the rows: [num_kv_heads, num_tokens, head_size]."""
        needed = -(-self.num_tokens // self.pages.shape[1])
        rows = self.pages[self.blocks[:needed].long()].flatten(0, 1)
        return rows[: self.num_tokens].transpose(0, 1)


Rows = torch.Tensor | PagedRows
"""Rows of one request: [num_kv_heads, num_tokens, head_size] in any strides, or paged."""


def as_dense(rows: Rows) -> torch.Tensor:
    """The rows as [num_kv_heads, num_tokens, head_size]; a copy only if they are paged."""
    return rows.dense() if isinstance(rows, PagedRows) else rows
