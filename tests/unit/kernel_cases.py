"""What the tests of the kernels share: shapes, inputs, caches, and float64 oracles in loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

NAN = float("nan")


class Shape(NamedTuple):
    """Sizes of one case; a window longer than the prompt is the caller's to clamp."""

    window: int
    prompt: int
    kv_heads: int
    group: int
    head_size: int
    dtype: torch.dtype


SHAPES = [
    Shape(1, 1, 1, 1, 64, torch.float32),
    Shape(1, 63, 2, 3, 64, torch.bfloat16),
    Shape(32, 63, 2, 4, 96, torch.float32),
    Shape(63, 63, 1, 7, 64, torch.float16),
    Shape(8, 100, 3, 1, 96, torch.bfloat16),
    Shape(100, 100, 1, 8, 128, torch.float32),
    Shape(32, 2000, 1, 7, 128, torch.bfloat16),
    Shape(64, 2000, 2, 3, 64, torch.float32),
    Shape(32, 2000, 1, 8, 96, torch.float16),
]

# For Triton's interpreter: every length, group, head size and type, in few cases, since each
# takes a second or more. Shape, block size and layout.
CASES = {
    "one token": (Shape(1, 1, 2, 1, 64, torch.float32), 16, "nhd"),
    "group of 3": (Shape(16, 63, 1, 3, 64, torch.bfloat16), 16, "hnd"),
    "group of 4": (Shape(40, 100, 1, 4, 96, torch.float16), 32, "nhd"),
    "group of 7": (Shape(8, 63, 1, 7, 128, torch.float32), 24, "transposed"),
    "group of 8": (Shape(20, 100, 1, 8, 64, torch.bfloat16), 16, "hnd"),
    "two thousand": (Shape(32, 2000, 1, 1, 128, torch.bfloat16), 16, "nhd"),
}
HUGE = Shape(8, 100, 1, 1, 64, torch.float32)
SPOILED = Shape(4, 40, 2, 1, 64, torch.float32)
# Shape, block size and start of what compaction moves, by layout.
MOVES = {
    "nhd": (Shape(1, 150, 2, 1, 64, torch.bfloat16), 16, 40),
    "hnd": (Shape(1, 100, 3, 1, 96, torch.float32), 24, 0),
    "transposed": (Shape(1, 90, 1, 1, 128, torch.float16), 32, 7),
}


class Inputs(NamedTuple):
    """Queries [W, H, d], keys and values [G, N, d], in the cache's type."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


def make_inputs(shape: Shape, size: float = 1.5, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> torch.Tensor:
        return (size * torch.randn(*sizes, generator=generator)).to(shape.dtype)

    rows = (shape.kv_heads, shape.prompt, shape.head_size)
    query = draw(shape.window, shape.kv_heads * shape.group, shape.head_size)
    return Inputs(query, draw(*rows), draw(*rows), shape.head_size**-0.5)


def paged(rows: torch.Tensor, block_size: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache that holds the rows: pages [num_blocks, block_size, G, d] and a block table.

    Unwritten slots are NaN, and so is what shares memory with the pages. `layout` is the order
    in memory: "nhd" and "hnd" as vLLM's FlashAttention cache `[2, ...]` has them, "transposed"
    as its CPU cache keeps keys.
    """
    kv_heads, tokens, head_size = rows.shape
    needed = -(-tokens // block_size)
    generator = torch.Generator().manual_seed(tokens)
    blocks = torch.randperm(needed + 3, generator=generator)[:needed].to(torch.int32)
    if layout == "nhd":
        memory = torch.full((2, needed + 3, block_size, kv_heads, head_size), NAN)
        pages = memory.to(rows.dtype)[1]
    elif layout == "hnd":
        memory = torch.full((2, needed + 3, kv_heads, block_size, head_size), NAN)
        pages = memory.to(rows.dtype)[1].transpose(1, 2)
    else:
        memory = torch.full((needed + 3, kv_heads, 2, head_size, block_size), NAN)
        pages = memory.to(rows.dtype)[:, :, 0].permute(0, 3, 1, 2)
    for token in range(tokens):
        pages[int(blocks[token // block_size]), token % block_size] = rows[:, token]
    return pages, blocks


def kept_positions(shape: Shape) -> torch.Tensor:
    """Half of the tokens, another half for each KV head."""
    generator = torch.Generator().manual_seed(7)
    draws = [torch.randperm(shape.prompt, generator=generator) for _ in range(shape.kv_heads)]
    return torch.stack([draw[: shape.prompt // 2].sort().values for draw in draws])


def weights_of(
    inputs: Inputs,
    noise: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Softmax weights [G, r, W, N] float64, one query at a time; zero after the query."""
    query, key = inputs.query.double(), inputs.key.double()
    window, heads, _ = query.shape
    kv_heads, prompt, _ = key.shape
    group = heads // kv_heads
    weights = torch.zeros(kv_heads, group, window, prompt, dtype=torch.float64)
    for head in range(heads):
        for index in range(window):
            seen = prompt - window + index + 1
            logits = key[head // group, :seen] @ query[index, head] * inputs.scale
            if noise is not None:
                row = head % group if noise.shape[1] > 1 else 0
                logits = logits + noise[head // group, row, :seen].double()
            powers = torch.exp((logits - logits.max()) / temperature)
            weights[head // group, head % group, index, :seen] = powers / powers.sum()
    return weights


def lse_of(inputs: Inputs) -> torch.Tensor:
    """Log-sum-exp of every query's logits, [H, W] float32."""
    query, key = inputs.query.double(), inputs.key.double()
    window, heads, _ = query.shape
    group, prompt = heads // key.shape[0], key.shape[1]
    lse = torch.empty(heads, window, dtype=torch.float64)
    for head in range(heads):
        for index in range(window):
            seen = prompt - window + index + 1
            logits = key[head // group, :seen] @ query[index, head] * inputs.scale
            lse[head, index] = torch.logsumexp(logits, 0)
    return lse.float()


def window_scores_of(inputs: Inputs, power: int, reduce_group: bool) -> torch.Tensor:
    scores = (weights_of(inputs) ** power).sum(dim=2)
    return scores.sum(dim=1) if reduce_group else scores


def peak_bytes(function: Callable[[], Any]) -> tuple[int, int]:
    """Most bytes that the function held at once, and those that its result still holds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    peak = held = 0
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for _, nbytes in sorted(changes):
        held += nbytes
        peak = max(peak, held)
    return peak, result.untyped_storage().nbytes()
