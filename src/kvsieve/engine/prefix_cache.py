"""The prefix cache's rules, bound where vLLM knows the request.

1. A request whose prompt is not sieved publishes and hits like stock.
2. A sieved request publishes at most its own prompt in *every* group: decoded KV of a
   full layer above a sieved one depends on the sieve. (Sieved groups stop earlier, at
   the start of the kept region: `SievedManager.cache_blocks`.)
3. It takes a hit of at most `min(start, P - window)` tokens: the kept region is
   overwritten, and the window's queries must be computed.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvsieve.engine.spec import SievedAttentionSpec


def bind_prefix_cache_rules(
    kv_cache_manager: KVCacheManager, specs: tuple[SievedAttentionSpec, ...]
) -> None:
    """Make one scheduler's cache manager follow the rules above.

    Args:
        kv_cache_manager: The manager of a scheduler that was just built.
        specs: The distinct sieved specs of its groups.
    """
    coordinator = kv_cache_manager.coordinator
    stock_cache_blocks = coordinator.cache_blocks
    stock_find_hit = coordinator.find_longest_cache_hit
    stock_get_computed_blocks = kv_cache_manager.get_computed_blocks
    hit_cap: int | None = None

    window = max(spec.observation_window for spec in specs)

    def starts(request: Request) -> list[int]:
        return [spec.start(request.num_prompt_tokens) for spec in specs]

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if any(starts(request)):
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        stock_cache_blocks(request, num_computed_tokens)

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
        if hit_cap is not None:
            max_cache_hit_length = min(max_cache_hit_length, hit_cap)
        return stock_find_hit(block_hashes, max_cache_hit_length)

    def get_computed_blocks(request: Request) -> Any:
        nonlocal hit_cap
        if any(starts(request)):
            hit_cap = max(0, min(*starts(request), request.num_prompt_tokens - window))
        try:
            return stock_get_computed_blocks(request)
        finally:
            hit_cap = None

    coordinator.cache_blocks = cache_blocks
    coordinator.find_longest_cache_hit = find_longest_cache_hit
    kv_cache_manager.get_computed_blocks = get_computed_blocks
