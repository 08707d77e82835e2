"""Checking and timing the Triton kernels on the GPU that is here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve import kernels
from kvsieve.kernels import triton_scores

BLOCK_SIZE = 16
WINDOW = 32
KEPT = 1024
FLUSH_BYTES = 256 * 2**20
"""Written before every timed call: more than the L2 of any GPU."""
COPY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Setting:
    """One model's attention layer and one prompt."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    num_tokens: int


SETTINGS = [
    Setting(heads, kv_heads, head_size, dtype, tokens)
    for heads, kv_heads, head_size, dtype in (
        (32, 8, 128, torch.bfloat16),
        (9, 3, 64, torch.bfloat16),
        (9, 3, 64, torch.float32),
    )
    for tokens in (4096, 32_768, 131_072)
]


class WrongResultError(Exception):
    """A kernel does not agree with the reference: its time means nothing."""


def median_seconds(function: Callable[[], Any], repeats: int = 50) -> float:
    """Median time of a call with a cold L2, by CUDA events."""
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy: what the floors are made of."""
    source = torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source), repeats=20)


def measure(setting: Setting, bandwidth: float) -> list[dict[str, Any]]:
    """Check every kernel against the reference, then time it.

    Raises:
        WrongResultError: A kernel does not agree with the reference.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    num_blocks = -(-setting.num_tokens // BLOCK_SIZE)
    cache = torch.randn(
        2, num_blocks + 7, BLOCK_SIZE, setting.num_kv_heads, setting.head_size,
        device="cuda", generator=generator,
    ).to(setting.dtype)  # fmt: skip
    blocks = torch.randperm(num_blocks + 7, device="cuda", generator=generator)
    blocks = blocks[:num_blocks].to(torch.int32)
    query = torch.randn(
        WINDOW, setting.num_heads, setting.head_size, device="cuda", generator=generator
    ).to(setting.dtype)
    keys = kernels.PagedRows(cache[0], blocks, setting.num_tokens)
    scale = setting.head_size**-0.5
    lse = triton_scores.log_sums(query, keys, scale)
    key_bytes = setting.num_tokens * setting.num_kv_heads * setting.head_size * cache.itemsize
    score_bytes = 4 * setting.num_tokens * setting.num_heads
    reduced_bytes = 4 * setting.num_tokens * setting.num_kv_heads
    cases = [
        ("scores, lse given", {"lse": lse}, key_bytes + score_bytes),
        ("scores, group, lse given", {"lse": lse, "reduce_group": True}, key_bytes + reduced_bytes),
        ("scores, group", {"reduce_group": True}, 2 * key_bytes + reduced_bytes),
    ]
    results = []
    for name, options, num_bytes in cases:

        def run(options: dict[str, Any] = options, impl: Any = "triton") -> torch.Tensor:
            return kernels.window_scores(query, keys, scale, impl=impl, **options)

        reference_options = {key: of for key, of in options.items() if key != "lse"}
        _compare(name, run(), run(reference_options, "reference"))
        results.append(_result(name, setting, run, num_bytes, bandwidth))
    results.append(_compaction(setting, cache[1], blocks, generator, bandwidth))
    return results


def _compaction(
    setting: Setting,
    pages: torch.Tensor,
    blocks: torch.Tensor,
    generator: torch.Generator,
    bandwidth: float,
) -> dict[str, Any]:
    draws = torch.rand(setting.num_kv_heads, setting.num_tokens, device="cuda", generator=generator)
    positions = draws.topk(KEPT).indices.sort().values
    start = (setting.num_tokens - KEPT) // BLOCK_SIZE * BLOCK_SIZE
    expected = pages.clone()
    kernels.compact_pages(expected, blocks, positions, start, impl="reference")

    def run() -> None:
        kernels.compact_pages(pages, blocks, positions, start, impl="triton")

    run()
    if not torch.equal(pages, expected):
        raise WrongResultError(f"compaction, {setting}: rows are not where they belong")
    # Rows are read, written to the scratch, read again and written.
    moved = 4 * positions.numel() * setting.head_size * pages.itemsize
    return _result("compaction", setting, run, moved + 8 * positions.numel(), bandwidth)


def _compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    try:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    except AssertionError as error:
        raise WrongResultError(f"{name}: {error}") from None


def _result(
    name: str, setting: Setting, run: Callable[[], Any], num_bytes: int, bandwidth: float
) -> dict[str, Any]:
    seconds, floor = median_seconds(run), num_bytes / bandwidth
    return {
        "kernel": name,
        "heads": setting.num_heads,
        "kv_heads": setting.num_kv_heads,
        "head_size": setting.head_size,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "tokens": setting.num_tokens,
        "seconds": seconds,
        "bytes": num_bytes,
        "floor_seconds": floor,
        "times_floor": seconds / floor,
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as lines of text."""
    lines = [
        f"{'kernel':<26} {'heads':>7} {'size':>4} {'type':>8} {'tokens':>7} {'us':>9}"
        f" {'floor us':>9} {'x floor':>7}"
    ]
    lines += [
        f"{one['kernel']:<26} {one['heads']:>4}/{one['kv_heads']:<2} {one['head_size']:>4}"
        f" {one['dtype']:>8} {one['tokens']:>7} {1e6 * one['seconds']:>9.1f}"
        f" {1e6 * one['floor_seconds']:>9.1f} {one['times_floor']:>7.2f}"
        for one in results
    ]
    return "\n".join(lines)
