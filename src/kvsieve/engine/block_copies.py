"""Copies whole blocks of the worker's KV cache, in every layer that shares the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

MAX_COPY_BYTES = 64 * 2**20
"""Bound on the temporary memory of one copy of one tensor, in bytes."""


class BlockCopier:
    """Copies blocks with vLLM's own copy-on-write routine.

    Args:
        runner: The worker's model runner, whose cache does not exist yet.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks.

        Args:
            pairs: Block ids (from, to) of the cache manager. No block is both.
        """
        if not pairs:
            return
        num_blocks = self._runner.kv_cache_config.num_blocks
        caches = self._runner.kv_caches
        page_bytes = max(cache.untyped_storage().nbytes() for cache in caches) // num_blocks
        at_once = max(1, MAX_COPY_BYTES // page_bytes)
        for first in range(0, len(pairs), at_once):
            copy_kv_cache_blocks_inplace(caches, num_blocks, pairs[first : first + at_once])
