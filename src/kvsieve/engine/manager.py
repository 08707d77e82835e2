"""Blocks of one group of sieved layers: allocated as full attention, freed from the front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from kvsieve.engine.requests import PlannedRequests


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
        # Requests that took a prefix hit beyond their start: index of the first block that
        # will be overwritten, until it has a private copy.
        self._tail_hits: dict[str, int] = {}
        self.published: set[int] = set()
        """Blocks published since a schedule began: not computed yet, so not to be copied."""

    def bind(self, requests: PlannedRequests) -> None:
        """Tell the manager of the scheduler's plans. Called once, before any request."""
        self._requests = requests
        self._tier = requests.tiers.index(self.spec)

    def first_kept_block(self, request_id: str) -> int:
        """Index of the first block that the request holds once it is sieved; 0 if it is not."""
        return self._requests[request_id].starts[self._tier] // self.block_size

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
        num_blocks = self.first_kept_block(request_id)
        # A block that another request shares through the prefix cache stays held.
        returned = sum(not b.is_null and b.ref_cnt == 1 for b in blocks[:num_blocks])
        self._remove_blocks_in_range(request_id, 0, num_blocks)
        self._freed[request_id] = returned

    def num_freed_blocks(self, request_id: str) -> int:
        """Blocks that went back to the pool when a request that is still known was sieved."""
        return self._freed.get(request_id, 0)

    @property
    def num_null_blocks(self) -> int:
        """Entries of the requests' block tables that hold no block any more."""
        return sum(self.first_kept_block(request_id) for request_id in self._freed)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request (it finished, was aborted or is preempted)."""
        self._freed.pop(request_id, None)
        self._tail_hits.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish to the prefix cache only what the sieve never overwrites.

        Blocks before the start keep the prompt's own KV; those after it receive the
        kept rows. A prompt that is not sieved publishes like stock.
        """
        first_kept = self.first_kept_block(request.request_id)
        if first_kept:
            num_tokens = min(num_tokens, first_kept * self.block_size)
        before = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, *args, **kwargs)
        after = self.num_cached_block.get(request.request_id, 0)
        blocks = self.req_to_blocks[request.request_id][before:after]
        self.published.update(block.block_id for block in blocks)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """As stock counts, and one more for each block of a hit that needs a private copy."""
        num_blocks = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, *args, **kwargs
        )
        return num_blocks + len(self.overwritten(request_id, new_computed_blocks))

    def overwritten(self, request_id: str, hit: Sequence[KVCacheBlock]) -> Sequence[KVCacheBlock]:
        """The blocks of a prefix hit that the request's own kept rows would overwrite."""
        first_kept = self.first_kept_block(request_id)
        return hit[first_kept:] if first_kept else ()

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kw: Any
    ) -> None:
        """Take a prefix hit, and note the part of it that must be copied."""
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kw)
        if self.overwritten(request_id, new_computed_blocks):
            self._tail_hits[request_id] = self.first_kept_block(request_id)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> list[KVCacheBlock]:
        """Allocate as stock, after giving the request its own copy of the tail of its hit.

        The copies are vLLM's copy-on-write: the worker makes them before the step's forward.
        """
        first = self._tail_hits.pop(request_id, None)
        if first is not None:
            shared = self.req_to_blocks[request_id][first:]
            for index, copy in enumerate(self.block_pool.get_new_blocks(len(shared)), first):
                self._apply_cow(request_id, index, shared[index - first], copy)
        return super().allocate_new_blocks(request_id, num_tokens, *args, **kwargs)

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
