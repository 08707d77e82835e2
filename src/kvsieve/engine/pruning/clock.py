"""What pruning saved, as far as the layers that ran can tell."""

from __future__ import annotations

import time


class LayerClock:
    """Time that layers took, and how much of it before anything was pruned.

    Host time: where a device runs behind the host, it says less.
    """

    def __init__(self) -> None:
        self._begin = 0.0
        self._seconds = 0.0
        self._whole_seconds = 0.0
        self._whole_tokens = 0

    def start(self) -> None:
        """A layer begins."""
        self._begin = time.perf_counter()

    def stop(self, num_tokens: int, *, is_whole: bool) -> None:
        """A layer has run on so many tokens, all that were there or what was left of them."""
        seconds = time.perf_counter() - self._begin
        self._seconds += seconds
        if is_whole:
            self._whole_seconds += seconds
            self._whole_tokens += num_tokens

    def saved(self, token_layers: int) -> float:
        """Seconds by which so many tokens times layers would have taken longer, unpruned."""
        if not self._whole_tokens:
            return 0.0
        unpruned = self._whole_seconds / self._whole_tokens * token_layers
        return max(0.0, unpruned - self._seconds)
