"""The prefix cache's rules, bound where vLLM knows the request.

1. A request that is not sieved publishes and hits like stock. (A shadow request must compute
   its window's queries, and is otherwise stock.)
2. A sieved request publishes its own prompt, and nothing beyond it, in *every* group: decoded
   KV of a full layer above a sieved one depends on the sieve. Sieved groups publish what lies
   before the start from the request's own blocks (`SievedManager.cache_blocks`), and the tail,
   which will be overwritten, from copies (`tail_copies.py`).
3. It takes a hit of at most `P - window` tokens, because the window's queries must be computed.
   What the hit covers beyond the start will be overwritten, so the request gets private copies
   of it (`SievedManager.allocate_new_blocks`). Where copies are not possible, the hit ends at
   the start.

4. A request that is pruned while it is read publishes nothing and hits nothing, in any group: its
   deeper layers never have the prompt, and `find_longest_cache_hit` wants a hit in all groups.

What is published is always KV of a prompt read with the full cache, whatever the budget and
the policy of the request that computed it, so requests of any budget may share it.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvsieve.engine.manager import SievedManager
from kvsieve.engine.requests import PlannedRequests


def bind_prefix_cache_rules(kv_cache_manager: KVCacheManager, requests: PlannedRequests) -> None:
    """Make one scheduler's cache manager follow the rules above.

    Args:
        kv_cache_manager: The manager of a scheduler that was just built.
        requests: The scheduler's plans.
    """
    coordinator = kv_cache_manager.coordinator
    stock_cache_blocks = coordinator.cache_blocks
    stock_find_hit = coordinator.find_longest_cache_hit
    stock_get_computed_blocks = kv_cache_manager.get_computed_blocks
    hit_cap: int | None = None

    window = max(tier.observation_window for tier in requests.tiers)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        plan = requests[request.request_id]
        if plan.is_pruned:
            return
        if plan.is_sieved:
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        stock_cache_blocks(request, num_computed_tokens)

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
        if hit_cap is not None:
            max_cache_hit_length = min(max_cache_hit_length, hit_cap)
        return stock_find_hit(block_hashes, max_cache_hit_length)

    def hit_of_at_most(request: Request, cap: int) -> Any:
        nonlocal hit_cap
        hit_cap = max(0, cap)
        try:
            return stock_get_computed_blocks(request)
        finally:
            hit_cap = None

    def get_computed_blocks(request: Request) -> Any:
        plan = requests[request.request_id]
        if plan.is_pruned:
            return hit_of_at_most(request, 0)
        if not plan.is_observed:
            return stock_get_computed_blocks(request)
        hit = hit_of_at_most(request, request.num_prompt_tokens - window)
        if _tail_can_be_copied(kv_cache_manager, request, hit[0].blocks):
            return hit
        # Something would be overwritten, so there is a start; a tier that keeps all has none.
        return hit_of_at_most(request, min(start for start in plan.starts if start))

    coordinator.cache_blocks = cache_blocks
    coordinator.find_longest_cache_hit = find_longest_cache_hit
    kv_cache_manager.get_computed_blocks = get_computed_blocks


def _tail_can_be_copied(kv_cache_manager: KVCacheManager, request: Request, hit: Any) -> bool:
    """Whether what a hit covers beyond the start can be copied in this schedule.

    It cannot if a sibling in the same schedule has still to compute it: the copies are made
    before the forward pass. And it must not if hit and copies do not fit the pool together,
    because the request would then wait for ever.
    """
    copies = 0
    needed = 0
    for manager, blocks in zip(kv_cache_manager.coordinator.single_type_managers, hit, strict=True):
        needed += cdiv(request.num_tokens, manager.block_size) - len(blocks)
        needed += sum(block.ref_cnt == 0 for block in blocks)
        if isinstance(manager, SievedManager):
            tail = manager.overwritten(request.request_id, blocks)
            if any(block.block_id in manager.published for block in tail):
                return False
            copies += len(tail)
    free = kv_cache_manager.block_pool.get_num_free_blocks()
    return not copies or needed + copies + kv_cache_manager.watermark_blocks <= free
