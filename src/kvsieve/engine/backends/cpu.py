"""CPU_ATTN: vLLM's attention on CPUs, isa `vec` and `vec16`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa

from kvsieve.engine.backends import CachedPrompt
from kvsieve.kernels import call, cpu, cpu_rows, cpu_scores
from kvsieve.kernels.pages import PagedRows
from kvsieve.policies import Policy

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
    def evidence(prompt: CachedPrompt, window: torch.Tensor, accumulated: Any) -> CpuEvidence:
        """What a policy may look at of one prompt in one layer (see `BackendAdapter`)."""
        return CpuEvidence(prompt, window, accumulated)

    @staticmethod
    def chunk(prompt: CachedPrompt, queries: torch.Tensor, first: int) -> CpuChunk:
        """Some queries of a prompt, with the keys before them (see `BackendAdapter`)."""
        return CpuChunk(prompt, queries, first)

    @staticmethod
    def scratch_bytes(layer: Any, policy: Policy, prompt_tokens: int) -> int:
        """Bytes that scoring and compacting need at once (see `BackendAdapter`)."""
        head_size, num_kv_heads = layer.head_size, layer.num_kv_heads
        numbers = num_kv_heads * head_size * prompt_tokens
        rows = numbers * layer.kv_cache_torch_dtype.itemsize
        # One float per query head and token: the attention, and what a policy makes of it.
        per_head = 4 * layer.num_heads * prompt_tokens
        held = rows + 3 * per_head
        scores = cpu_scores.scratch_bytes(prompt_tokens, head_size, layer.num_heads) + 3 * per_head
        # A float copy of keys or values, another that is normalised, and their product.
        copies = 3 * 4 * numbers * len(policy.looks_at & {"keys", "values"})
        values = 2 * rows if policy.looks_at & {"values", "output_norms"} else 0
        tiles = 0
        if "key_redundancy" in policy.looks_at:
            tiles = cpu_rows.redundancy_scratch_bytes(prompt_tokens, head_size)
        if "output_norms" in policy.looks_at:
            tiles = cpu_rows.norms_scratch_bytes(head_size, layer.num_heads * head_size)
        # Compaction gathers the kept keys and values, and their positions.
        moved = 2 * rows + 40 * num_kv_heads * prompt_tokens
        # Keys are gathered as pages first, and then transposed.
        return held + max(rows, scores + copies + values + tiles, moved)


class CpuEvidence:
    """A prompt in one layer's cache (`CachedEvidence`); what is asked for twice is kept."""

    def __init__(self, prompt: CachedPrompt, window: torch.Tensor, accumulated: Any) -> None:
        self.num_tokens = prompt.num_tokens
        self.num_kv_heads = prompt.layer.module.num_kv_heads
        self.layer = prompt.layer.number
        self._layer = prompt.layer
        self._blocks = prompt.blocks
        self._window = window
        self._accumulated = accumulated
        self._scale = prompt.layer.module.impl.scale
        self._key_pages, self._value_pages = cpu.split_pages(prompt.layer.module.kv_cache)
        # Transposed as the cache holds them, [num_kv_heads, head_size, n]: scoring multiplies
        # with them and compaction moves them.
        self._keys = cpu.gather_keys(self._key_pages, prompt.blocks, prompt.num_tokens)
        self._window_attention: dict[int, torch.Tensor] = {}

    @property
    def _key_rows(self) -> torch.Tensor:
        return self._keys.transpose(1, 2)

    def window_attention(self, power: Literal[1, 2] = 1) -> torch.Tensor:
        """See `Evidence`."""
        known = self._window_attention
        if power == 2 and 2 not in known:
            # What is lost is counted from the first power, so that is needed too.
            known[1], known[2] = call.window_scores_and_squares(
                self._window, self._key_rows, self._scale, impl="cpu"
            )
        elif power not in known:
            known[power] = call.window_scores(self._window, self._key_rows, self._scale, impl="cpu")
        return self._window_attention[power]

    def grouped_window_mean(self) -> torch.Tensor:
        """See `Evidence`."""
        return call.grouped_window_mean(self._window, self._key_rows, self._scale, impl="cpu")

    def keys(self) -> torch.Tensor:
        """See `Evidence`."""
        return self._key_rows.float()

    def values(self) -> torch.Tensor:
        """See `Evidence`."""
        return self._value_rows.dense().float()

    @property
    def _value_rows(self) -> PagedRows:
        pages = self._value_pages.transpose(1, 2)
        return PagedRows(pages, self._blocks, self.num_tokens)

    def key_redundancy(self) -> torch.Tensor:
        """See `Evidence`."""
        return call.key_redundancy(self._key_rows, impl="cpu")

    def output_norms(self) -> torch.Tensor:
        """See `Evidence`."""
        projection = self._layer.output_projection
        assert projection is not None, "install refuses a policy that misses it"
        return call.output_norms(self._value_rows, projection, impl="cpu")

    def accumulated(self) -> Any:
        """See `Evidence`."""
        return self._accumulated

    def compact(self, positions: torch.Tensor, start: int) -> None:
        """See `CachedEvidence`."""
        cpu.compact(self._key_pages, self._value_pages, self._keys, self._blocks, positions, start)


class CpuChunk:
    """Some queries of a prompt that is being read (`Chunk`)."""

    def __init__(self, prompt: CachedPrompt, queries: torch.Tensor, first: int) -> None:
        self.first = first
        self.num_queries = queries.shape[0]
        self.prompt_tokens = prompt.num_tokens
        self.num_kv_heads = prompt.layer.module.num_kv_heads
        self.num_queries_per_kv = queries.shape[1] // self.num_kv_heads
        self.rotary = prompt.layer.rotary
        self._prompt = prompt
        self._queries = queries

    def queries(self) -> torch.Tensor:
        """See `Chunk`."""
        return self._queries

    def attention_sums(
        self, noise: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        """See `Chunk`."""
        key_pages, _ = cpu.split_pages(self._prompt.layer.module.kv_cache)
        keys = cpu.gather_keys(key_pages, self._prompt.blocks, self.first + self.num_queries)
        return call.attention_sums(
            self._queries,
            keys.transpose(1, 2),
            self._prompt.layer.module.impl.scale,
            impl="cpu",
            noise=noise,
            temperature=temperature,
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
