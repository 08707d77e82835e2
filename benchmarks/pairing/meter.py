"""Timers around methods of a running engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Meter:
    """Sums the time spent in wrapped methods, per key, between two calls of `take`.

    Args:
        clocks: Clock functions by name; each is read before and after every call.
    """

    def __init__(self, clocks: dict[str, Callable[[], float]]) -> None:
        self._clocks = tuple(clocks.values())
        self._names = tuple(clocks)
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(self._clocks))
        self._wrapped: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, method: str, key: str) -> None:
        """Time `owner.method`, an instance's method, under `key`.

        Nested wrapped calls count in both keys; recursion is not supported.
        """
        inner = getattr(owner, method)
        clocks, sums = self._clocks, self._sums

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = [clock() for clock in clocks]
            try:
                return inner(*args, **kwargs)
            finally:
                total = sums[key]
                for index, clock in enumerate(clocks):
                    total[index] += clock() - begin[index]

        self._wrapped.append((owner, method, vars(owner).get(method, _ABSENT)))
        setattr(owner, method, timed)

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds per key and clock since the last call."""
        taken = {key: dict(zip(self._names, sums, strict=True)) for key, sums in self._sums.items()}
        self._sums.clear()
        return taken

    def remove(self) -> None:
        """Unwrap everything."""
        for owner, method, shadowed in reversed(self._wrapped):
            if shadowed is _ABSENT:
                delattr(owner, method)
            else:
                setattr(owner, method, shadowed)
        self._wrapped.clear()


def host_meter() -> Meter:
    """A meter for host time: wall clock, and the CPU clock of the calling thread.

    The second ignores the time in which other processes had the core.
    """
    return Meter({"wall": time.perf_counter, "cpu": time.thread_time})


def cpu_meter() -> Meter:
    """A meter for CPU time of the whole process, all threads."""
    return Meter({"cpu": time.process_time})
