"""Window scores in Triton: keys outside, queries inside, straight from a paged cache.

Two kernels. `_lse_kernel` computes the log-sum-exp of the queries, split over the keys as in
flash decoding; where the attention kernel returned it, it is not run. `_score_kernel` then
needs no reduction over keys: a program loads one tile of keys once, runs over the queries of
the KV head and writes its sums once, so there are no atomics and the result does not depend
on the order of programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvsieve.kernels.pages import PagedRows, Rows

LOG2E = math.log2(math.e)
WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies bfloat16 as the integers that hold the bits (3.9.0), so there
inputs become float32 first. Products and sums are in float32 either way."""
MAX_SPLITS = 64
"""Parts that the keys are split into for the log-sum-exp, at most. The scratch is one float
for each part, head and query."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of one program.

    Args:
        block_k: Keys of a tile.
        block_q: Queries of a tile.
        num_warps: Warps of a program.
        num_stages: Tiles of the pipelined loop in flight.
    """

    block_k: int
    block_q: int
    num_warps: int
    num_stages: int


def tiling(window: int, head_size: int, item_bytes: int) -> Tiling:
    """The tiling for a window, head size and type. None spills registers on sm_80, sm_89, sm_90.

    float32 is multiplied exactly, without tensor cores, and takes smaller tiles.
    """
    block_q = min(32, max(16, triton.next_power_of_2(window)))
    if item_bytes == 4:
        return Tiling(32 if head_size <= 64 else 16, 16, 4, 1)
    return Tiling(128 if head_size <= 64 else 64, block_q, 4, 2)


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(
    pages: tl.tensor,
    blocks: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    head: tl.tensor,
    block_size: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Rows of a paged cache, [tokens, BLOCK_D]; zero where not valid and beyond the head."""
    dim = tl.arange(0, BLOCK_D)
    block = tl.load(blocks + token // block_size, mask=valid, other=0).to(tl.int64)
    row = block * stride_block + (token % block_size).to(tl.int64) * stride_token
    row += head.to(tl.int64) * stride_head
    # The offset within a row is small: 32 bits keep the pointer arithmetic cheap.
    address = pages + row[:, None] + (dim * stride_dim)[None, :]
    mask = valid[:, None]
    if HEAD_SIZE != BLOCK_D:
        mask = mask & (dim < HEAD_SIZE)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _load_queries(
    query: tl.tensor,
    index: tl.tensor,
    head: tl.tensor,
    stride_query: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Queries of one head, [queries, BLOCK_D]; zero beyond the window and the head."""
    dim = tl.arange(0, BLOCK_D)
    address = query + index[:, None] * stride_query + head * stride_head
    address += (dim * stride_dim)[None, :]
    mask = (index < WINDOW)[:, None]
    if HEAD_SIZE != BLOCK_D:
        mask = mask & (dim < HEAD_SIZE)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """`a @ b.T`, accumulated in float32."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _lse_kernel(
    query: tl.tensor,
    pages: tl.tensor,
    blocks: tl.tensor,
    partial: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    tokens_per_split: tl.tensor,
    block_size: tl.tensor,
    stride_query: tl.tensor,
    stride_query_head: tl.tensor,
    stride_query_dim: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> None:
    """Log-sum-exp in base 2 over one part of the keys: partial [splits, H, W]."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    kv_head = head // GROUP
    position = num_tokens - WINDOW + index
    queries = _load_queries(
        query, index, head, stride_query, stride_query_head, stride_query_dim,
        WINDOW, HEAD_SIZE, BLOCK_D,
    )  # fmt: skip
    largest = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    first = split * tokens_per_split
    end = tl.minimum(first + tokens_per_split, num_tokens)
    for start in range(first, end, BLOCK_K):
        token = start + tl.arange(0, BLOCK_K)
        valid = token < end
        keys = _load_rows(
            pages, blocks, token, valid, kv_head, block_size,
            stride_block, stride_token, stride_head, stride_dim, HEAD_SIZE, BLOCK_D,
        )  # fmt: skip
        logits = _multiply(queries, keys) * scale_log2
        seen = valid[None, :] & (token[None, :] <= position[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        # NaN must not be lost: a maximum that drops it still leaves it in the exponentials.
        higher = tl.maximum(largest, tl.max(logits, axis=1))
        # A query sees none of the keys yet: minus infinity less itself is no number.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(logits - shift[:, None]), axis=1)
        largest = higher
    lse = largest + tl.log2(total)
    offset = (split * tl.num_programs(1) + head).to(tl.int64) * WINDOW + index
    tl.store(partial + offset, lse, mask=index < WINDOW)


@triton.jit  # type: ignore[untyped-decorator]
def _score_kernel(
    query: tl.tensor,
    pages: tl.tensor,
    blocks: tl.tensor,
    lse_log2: tl.tensor,
    scores: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    block_size: tl.tensor,
    stride_query: tl.tensor,
    stride_query_head: tl.tensor,
    stride_query_dim: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    POWER: tl.constexpr,
    REDUCE_GROUP: tl.constexpr,
) -> None:
    """Column sums of exp2(logits - lse) ** POWER: scores [G, N] or [G, GROUP, N]."""
    start = tl.program_id(0) * BLOCK_K
    kv_head = tl.program_id(1)
    token = start + tl.arange(0, BLOCK_K)
    valid = token < num_tokens
    first_position = num_tokens - WINDOW
    keys = _load_rows(
        pages, blocks, token, valid, kv_head, block_size,
        stride_block, stride_token, stride_head, stride_dim, HEAD_SIZE, BLOCK_D,
    )  # fmt: skip
    total = tl.zeros([BLOCK_K], dtype=tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for first in range(0, WINDOW, BLOCK_Q):
            index = first + tl.arange(0, BLOCK_Q)
            queries = _load_queries(
                query, index, head, stride_query, stride_query_head, stride_query_dim,
                WINDOW, HEAD_SIZE, BLOCK_D,
            )  # fmt: skip
            # Beyond the window an infinite denominator makes every weight zero.
            lse = tl.load(lse_log2 + head * WINDOW + index, mask=index < WINDOW, other=float("inf"))
            logits = _multiply(keys, queries) * scale_log2
            if start + BLOCK_K > first_position:
                hidden = token[:, None] > (first_position + index)[None, :]
                logits = tl.where(hidden, float("-inf"), logits)
            weights = tl.exp2(logits - lse[None, :])
            if POWER == 2:
                weights = weights * weights
            total += tl.sum(weights, axis=1)
        if not REDUCE_GROUP:
            tl.store(scores + head.to(tl.int64) * num_tokens + token, total, mask=valid)
            total = tl.zeros([BLOCK_K], dtype=tl.float32)
    if REDUCE_GROUP:
        tl.store(scores + kv_head.to(tl.int64) * num_tokens + token, total, mask=valid)


def window_scores(
    query: torch.Tensor,
    keys: Rows,
    scale: float,
    *,
    power: int = 1,
    lse: torch.Tensor | None = None,
    reduce_group: bool = False,
) -> torch.Tensor:
    """See `call.window_scores`."""
    window, num_heads, head_size = query.shape
    paged = _as_paged(keys)
    num_kv_heads = paged.pages.shape[2]
    query = query.to(paged.pages.dtype)
    sizes = tiling(window, head_size, query.element_size())
    lse_log2 = _log_sums(query, paged, scale, sizes) if lse is None else lse.float() * LOG2E
    group = num_heads // num_kv_heads
    shape = (num_kv_heads, paged.num_tokens) if reduce_group else (
        num_kv_heads, group, paged.num_tokens
    )  # fmt: skip
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    _score_kernel[(triton.cdiv(paged.num_tokens, sizes.block_k), num_kv_heads)](
        query,
        paged.pages,
        paged.blocks,
        lse_log2.contiguous(),
        scores,
        scale * LOG2E,
        paged.num_tokens,
        paged.pages.shape[1],
        *query.stride(),
        *paged.pages.stride(),
        GROUP=group,
        WINDOW=window,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_K=sizes.block_k,
        BLOCK_Q=sizes.block_q,
        POWER=power,
        REDUCE_GROUP=reduce_group,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
    return scores


def log_sums(query: torch.Tensor, keys: Rows, scale: float) -> torch.Tensor:
    """The log-sum-exp of the window's queries, as `window_scores` takes it.

    Args:
        query: [W, H, d].
        keys: [G, N, d] in any strides, or paged.
        scale: Softmax scale.

    Returns:
        [H, W] float32, natural logarithm.
    """
    paged = _as_paged(keys)
    query = query.to(paged.pages.dtype)
    sizes = tiling(query.shape[0], query.shape[2], query.element_size())
    return _log_sums(query, paged, scale, sizes) / LOG2E


def scratch_bytes(window: int, num_heads: int) -> int:
    """Bytes that `window_scores` holds at once beyond its inputs and its result, at most.

    The parts of the log-sum-exp and their combination; independent of the prompt.
    """
    return (2 * MAX_SPLITS + 4) * window * num_heads * 4


def _as_paged(keys: Rows) -> PagedRows:
    """Dense rows are a cache of one page."""
    if isinstance(keys, PagedRows):
        return keys
    block = torch.zeros(1, dtype=torch.int32, device=keys.device)
    return PagedRows(keys.transpose(0, 1).unsqueeze(0), block, keys.shape[1])


def _log_sums(query: torch.Tensor, paged: PagedRows, scale: float, sizes: Tiling) -> torch.Tensor:
    """[H, W] float32, logarithm to the base 2."""
    window, num_heads, head_size = query.shape
    num_tokens = paged.num_tokens
    num_splits = min(MAX_SPLITS, triton.cdiv(num_tokens, sizes.block_k))
    tiles_per_split = triton.cdiv(triton.cdiv(num_tokens, sizes.block_k), num_splits)
    partial = torch.empty((num_splits, num_heads, window), dtype=torch.float32, device=query.device)
    _lse_kernel[(num_splits, num_heads, triton.cdiv(window, sizes.block_q))](
        query,
        paged.pages,
        paged.blocks,
        partial,
        scale * LOG2E,
        num_tokens,
        tiles_per_split * sizes.block_k,
        paged.pages.shape[1],
        *query.stride(),
        *paged.pages.stride(),
        GROUP=num_heads // paged.pages.shape[2],
        WINDOW=window,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_K=sizes.block_k,
        BLOCK_Q=sizes.block_q,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
    # A part that a query sees nothing of is minus infinity; every query sees the first.
    largest = partial.amax(dim=0)
    return largest + torch.log2(torch.exp2(partial - largest).sum(dim=0))
