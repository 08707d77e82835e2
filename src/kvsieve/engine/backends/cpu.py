"""CPU_ATTN: vLLM's attention on CPUs, isa `vec` and `vec16`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa

from kvsieve.engine.backends import Selection
from kvsieve.kernels import cpu
from kvsieve.policies import Policy, attention_mass_lost

SIEVED_ISAS = ("vec", "vec16")
SIEVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuAdapter:
    """Cache layout and metadata of CPU_ATTN."""

    @staticmethod
    def refusals(layer: Any, block_size: int) -> list[str]:
        """Reasons why a layer cannot be sieved: isa, dtype, or an unexpected cache layout."""
        dtype = layer.kv_cache_torch_dtype
        if dtype not in SIEVED_DTYPES:
            return [
                f"the KV cache type {dtype} of CPU_ATTN cannot be sieved; use --kv-cache-dtype auto"
            ]
        isa = _get_attn_isa(dtype, block_size, layer.head_size)
        if isa not in SIEVED_ISAS:
            return [
                f"CPU_ATTN would use the isa {isa!r} for {dtype}, whose packed cache kvsieve does"
                f" not read (it reads {', '.join(SIEVED_ISAS)}); use --dtype float32"
            ]
        return _layout_refusals(layer.num_kv_heads, layer.head_size, block_size, dtype, isa)

    @staticmethod
    def with_blocks(
        metadata: CPUAttentionMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CPUAttentionMetadata:
        """A copy for another group's blocks; the work split does not depend on blocks."""
        return dataclasses.replace(metadata, block_table=block_table, slot_mapping=slot_mapping)

    @staticmethod
    def sieve(
        kv_cache: torch.Tensor,
        blocks: torch.Tensor,
        query: torch.Tensor,
        scale: float,
        policy: Policy,
        prompt_tokens: int,
        start: int,
        move: bool,
    ) -> Selection:
        """Score one prompt in one layer, and move the kept rows (see `BackendAdapter`)."""
        key_pages, value_pages = cpu.split_pages(kv_cache)
        keys = cpu.gather_keys(key_pages, blocks, prompt_tokens)
        head_scores = cpu.window_sum(query, keys, scale)
        num_keep = prompt_tokens - start - policy.observation_window
        positions = policy.select(head_scores, num_keep)
        if move:
            cpu.compact(key_pages, value_pages, keys, blocks, positions, start)
        mass_lost = attention_mass_lost(head_scores, positions, policy.observation_window)
        return Selection(positions, mass_lost)

    @staticmethod
    def scratch_bytes(layer: Any, policy: Policy, prompt_tokens: int) -> int:
        """Bytes that `sieve` needs at once (see `BackendAdapter`)."""
        return cpu.scratch_bytes(
            policy.observation_window,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            layer.kv_cache_torch_dtype.itemsize,
            prompt_tokens,
        )


def _layout_refusals(
    num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, isa: str
) -> list[str]:
    """Write two blocks through the stock op and read them back through our views."""
    num_tokens = 2 * block_size - 1
    shape = (num_tokens, num_kv_heads, head_size)
    written = torch.arange(num_tokens * num_kv_heads * head_size).remainder_(251).view(shape)
    key, value = written.to(dtype), (250 - written).to(dtype)
    kv_cache = torch.zeros(3, num_kv_heads, block_size, 2 * head_size, dtype=dtype)
    pages = kv_cache.view(3, num_kv_heads, 2 * block_size, head_size)
    key_cache, value_cache = pages.chunk(2, dim=2)
    slots = torch.arange(block_size, block_size + num_tokens)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    blocks = torch.tensor([1, 2])
    key_pages, value_pages = cpu.split_pages(kv_cache)
    read_key = cpu.gather_keys(key_pages, blocks, num_tokens).permute(2, 0, 1)
    read_value = value_pages[blocks].transpose(1, 2).reshape(-1, num_kv_heads, head_size)
    if torch.equal(read_key, key) and torch.equal(read_value[:num_tokens], value):
        return []
    return [
        f"CPU_ATTN stores its cache (isa {isa!r}, {dtype}) in a layout that kvsieve does not know;"
        " please report the output of `kvsieve doctor`"
    ]
