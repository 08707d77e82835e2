"""Blocks of one group of sieved layers: allocated as full attention, freed from the front."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request


class SievedManager(SingleTypeKVCacheManager):
    """Frees the leading blocks of a request once its prompt has been processed.

    Blocks are freed on processed token counts only (vLLM passes those): a step in
    flight may still read the whole prompt.

    Args:
        kv_cache_spec: The group's `SievedAttentionSpec`, whose module registers this class.
        kwargs: As vLLM passes them.
    """

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.spec = kv_cache_spec
        self._freed: dict[str, int] = {}

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Free the blocks before the kept region, once, when the prompt is processed.

        Args:
            request_id: The request.
            processed_computed_tokens: Tokens whose steps are over.
            num_prompt_tokens: The original prompt length.
        """
        if num_prompt_tokens is None or processed_computed_tokens < num_prompt_tokens:
            return
        if request_id in self._freed:
            return
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        num_blocks = self.spec.start(num_prompt_tokens) // self.block_size
        # A block that another request shares through the prefix cache stays held.
        returned = sum(not b.is_null and b.ref_cnt == 1 for b in blocks[:num_blocks])
        self._remove_blocks_in_range(request_id, 0, num_blocks)
        self._freed[request_id] = returned

    def num_freed_blocks(self, request_id: str) -> int:
        """Blocks that went back to the pool when a request that is still known was sieved."""
        return self._freed.get(request_id, 0)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request (it finished, was aborted or is preempted)."""
        self._freed.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish to the prefix cache only what the sieve never overwrites.

        Blocks before the start keep the prompt's own KV; those after it receive the
        kept rows. A prompt that is not sieved publishes like stock.
        """
        start = self.spec.start(request.num_prompt_tokens)
        if start:
            num_tokens = min(num_tokens, start)
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest run of cached blocks from the front, as full attention looks it up.

        The cap that a request's own start puts on a hit is applied by the scheduler
        (`engine/prefix_cache.py`), because no request is known here.
        """
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        hits: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        for index in range(min(max_length // block_size, len(hashes))):
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if not cached:
                break
            for blocks, block in zip(hits, cached, strict=True):
                blocks.append(block)
        # Groups agree on a length that is a multiple of the scheduler's alignment.
        num_blocks = len(hits[0])
        while num_blocks * block_size % alignment_tokens:
            num_blocks -= 1
        for blocks in hits:
            del blocks[num_blocks:]
        return hits, num_blocks * block_size
