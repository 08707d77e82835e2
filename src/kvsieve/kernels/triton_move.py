"""Compaction of a paged cache in Triton: gather into a scratch buffer, then scatter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS_PER_PROGRAM = 32


@triton.jit  # type: ignore[untyped-decorator]
def _move_kernel(
    pages: tl.tensor,
    blocks: tl.tensor,
    positions: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor,
    num_keep: tl.tensor,
    block_size: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    stride_positions: tl.tensor,
    GATHER: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """GATHER: kept[head, i] = row positions[head, i]; else row start + i = kept[head, i]."""
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = index < num_keep
    dim = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dim < HEAD_SIZE)[None, :]
    if GATHER:
        token = tl.load(positions + head * stride_positions + index, mask=valid, other=0)
    else:
        token = start + index
    block = tl.load(blocks + token // block_size, mask=valid, other=0).to(tl.int64)
    row = block * stride_block + (token % block_size).to(tl.int64) * stride_token
    in_cache = pages + (row + head * stride_head)[:, None] + (dim * stride_dim)[None, :]
    in_scratch = kept + ((head * num_keep + index) * HEAD_SIZE)[:, None] + dim[None, :]
    if GATHER:
        tl.store(in_scratch, tl.load(in_cache, mask=mask), mask=mask)
    else:
        tl.store(in_cache, tl.load(in_scratch, mask=mask), mask=mask)


def compact_pages(
    pages: torch.Tensor, blocks: torch.Tensor, positions: torch.Tensor, start: int
) -> None:
    """See `call.compact_pages`."""
    num_kv_heads, num_keep = positions.shape
    if num_keep == 0:
        return
    head_size = pages.shape[3]
    kept = torch.empty((num_kv_heads, num_keep, head_size), dtype=pages.dtype, device=pages.device)
    positions = positions.contiguous()
    # Two launches: a row may be the source of one program and the target of another.
    for gather in (True, False):
        _move_kernel[(triton.cdiv(num_keep, ROWS_PER_PROGRAM), num_kv_heads)](
            pages,
            blocks,
            positions,
            kept,
            start,
            num_keep,
            pages.shape[1],
            *pages.stride(),
            positions.stride(0),
            GATHER=gather,
            HEAD_SIZE=head_size,
            BLOCK_D=triton.next_power_of_2(head_size),
            ROWS=ROWS_PER_PROGRAM,
            num_warps=4,
        )


def scratch_bytes(num_kv_heads: int, num_keep: int, head_size: int, item_bytes: int) -> int:
    """Bytes that `compact_pages` holds at once: the kept rows, and their positions at most."""
    return num_kv_heads * num_keep * (head_size * item_bytes + 8)
