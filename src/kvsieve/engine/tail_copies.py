"""The tail of a sieved prompt goes to the prefix cache from copies.

The kept rows overwrite the tail of the prompt in the sieved groups, so its blocks cannot be
published themselves. When a prompt ends in a step, the worker therefore copies them to free
blocks of the pool before it compacts, and once the step was processed the copies are published
and given back to the pool, where they lie as cached, evictable blocks like any other. The next
turn of a chat finds its whole history. Copies are made only where the pool has blocks to spare:
without them a later request computes more, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.request import Request

from kvsieve.engine.manager import SievedManager


@dataclass(frozen=True)
class TailCopy:
    """One block that is copied and will be published.

    Attributes:
        source: The request's own block.
        copy: The block that receives its content; held until the step was processed.
        key: The block's hash with its group, as the prefix cache knows it.
        num_tokens: Tokens of the prompt up to the block's end.
    """

    source: KVCacheBlock
    copy: KVCacheBlock
    key: Any
    num_tokens: int


class TailCopies:
    """Makes and publishes the copies of one scheduler.

    Args:
        block_pool: The scheduler's pool.
        managers: The managers of its sieved groups.
    """

    def __init__(self, block_pool: BlockPool, managers: Iterable[SievedManager]) -> None:
        self._pool = block_pool
        self._managers = tuple(managers)
        self._in_flight: dict[int, list[TailCopy]] = {}
        # Siblings that end in one step need one copy between them.
        self._keys: set[Any] = set()
        self._next_ticket = 0

    @property
    def num_held(self) -> int:
        """Blocks held for copies of steps that were not processed yet."""
        return sum(len(copies) for copies in self._in_flight.values())

    def plan(self, requests: Iterable[Request], num_reserved: int) -> tuple[int, list[TailCopy]]:
        """Reserve copies for the prompts that end in the step just scheduled.

        Args:
            requests: The sieved requests whose prompt ends in the step.
            num_reserved: Free blocks to leave alone.

        Returns:
            A ticket for `publish`, and the copies that the worker must make.
        """
        copies: list[TailCopy] = []
        spare = self._pool.get_num_free_blocks() - num_reserved
        for request in requests:
            copies.extend(self._plan_request(request, spare - len(copies)))
        self._next_ticket += 1
        if copies:
            self._in_flight[self._next_ticket] = copies
        return self._next_ticket, copies

    def _plan_request(self, request: Request, spare: int) -> list[TailCopy]:
        missing: list[tuple[KVCacheBlock, Any, int]] = []
        # A tier that keeps the whole prompt publishes its own blocks.
        firsts = [
            (manager, manager.first_kept_block(request.request_id)) for manager in self._managers
        ]
        firsts = [(manager, first) for manager, first in firsts if first]
        block_size = self._managers[0].block_size
        hashes = resolve_block_hashes(request.block_hashes, self._pool.hash_block_size, block_size)
        # A hit ends where one group's does, so a block is only worth having in all groups.
        begin = min(first for _, first in firsts)
        for index in range(begin, request.num_prompt_tokens // block_size):
            wanted = []
            for manager, first in firsts:
                if index < first:
                    continue
                key = make_block_hash_with_group_id(hashes[index], manager.kv_cache_group_id)
                cached = self._pool.cached_block_hash_to_block.get_one_block(key)
                if cached is None and key not in self._keys:
                    source = manager.req_to_blocks[request.request_id][index]
                    wanted.append((source, key, (index + 1) * block_size))
            if len(missing) + len(wanted) > spare:
                break
            missing.extend(wanted)
        self._keys.update(key for _, key, _ in missing)
        blocks = self._pool.get_new_blocks(len(missing))
        return [
            TailCopy(source, copy, key, num_tokens)
            for copy, (source, key, num_tokens) in zip(blocks, missing, strict=True)
        ]

    def publish(self, ticket: int) -> None:
        """Publish the copies of a step that was processed, and give them back to the pool."""
        copies = self._in_flight.pop(ticket, ())
        for copy in copies:
            self._pool._insert_block_hash(copy.key, copy.copy, num_tokens=copy.num_tokens)
            self._keys.discard(copy.key)
        # The last blocks of a prompt are the first to be evicted, as everywhere in vLLM.
        self._pool.free_blocks(copy.copy for copy in reversed(copies))

    def drop(self) -> None:
        """Give back every copy without publishing it: the cache is being reset."""
        for copies in self._in_flight.values():
            self._pool.free_blocks(copy.copy for copy in copies)
        self._in_flight.clear()
        self._keys.clear()
