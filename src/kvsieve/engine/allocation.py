"""A short cut through block allocation for decode steps.

A decoding request needs a new block, and can publish one, once in a block's length; vLLM
asks every cache group about it in every step. With the groups of a sieved model that
would be most of the scheduler's time (docs/benchmarks.md, "Host time").
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from kvsieve.engine.manager import SievedManager


def bind_decode_shortcut(kv_cache_manager: KVCacheManager) -> bool:
    """Make one scheduler's cache manager skip the groups where they have nothing to do.

    The short cut is taken for one token that is neither the first nor the last of its
    block. No group can then need a block or fill one, and nothing is to be freed: full
    groups free nothing, and sieved ones free at the start of a schedule.

    Returns:
        Whether the short cut applies: all groups are full or sieved, of one block size.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    kinds = {type(manager) for manager in managers}
    block_sizes = {manager.block_size for manager in managers}
    if not kinds <= {FullAttentionManager, SievedManager} or len(block_sizes) != 1:
        return False
    block_size = block_sizes.pop()
    stock_allocate_slots = kv_cache_manager.allocate_slots
    nothing_new = kv_cache_manager.empty_kv_cache_blocks

    def allocate_slots(
        request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        # A waiting request comes with more arguments than a running one's look-ahead of 0.
        is_decode = num_new_tokens == 1 and not args and not any(kwargs.values())
        if is_decode and 0 < request.num_computed_tokens % block_size < block_size - 1:
            return nothing_new
        return stock_allocate_slots(request, num_new_tokens, *args, **kwargs)

    kv_cache_manager.allocate_slots = allocate_slots
    return True
