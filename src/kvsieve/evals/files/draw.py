"""A seeded draw of items, in one pass over them."""

from __future__ import annotations

import hashlib
import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Draw(Generic[Item]):
    """Keeps the items whose keys hash lowest.

    So what is drawn depends on the keys and the seed alone, a smaller draw is a part of a larger
    one, and only what is drawn stays in memory.

    Args:
        count: Items to draw; None keeps all.
        seed: Another seed draws others.
    """

    def __init__(self, count: int | None, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._offered = 0
        # A heap of the highest hash first; places are distinct, so items are never compared.
        self._kept: list[tuple[int, int, Item]] = []

    def offer(self, key: str, item: Item) -> None:
        """Consider an item; the key must be its own."""
        digest = hashlib.blake2b(f"{self._seed}/{key}".encode(), digest_size=8).digest()
        entry = (-int.from_bytes(digest, "big"), self._offered, item)
        self._offered += 1
        if self._count is None or len(self._kept) < self._count:
            heapq.heappush(self._kept, entry)
        elif self._count:
            heapq.heappushpop(self._kept, entry)

    def items(self) -> list[Item]:
        """What was drawn, in the order offered."""
        return [item for _, _, item in sorted(self._kept, key=lambda entry: entry[1])]
