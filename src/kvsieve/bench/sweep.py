"""The search for the highest concurrency that keeps a bound: pure, one point after another."""

from __future__ import annotations

from collections.abc import Mapping

REQUESTS_PER_CLIENT = 3
"""All clients start at once, and that burst waits longest; with three requests for each client
it is a minority that a median does not follow."""


def highest_met(met: Mapping[int, bool]) -> int:
    """The answer so far: the highest measured concurrency below every one that failed.

    Args:
        met: For each concurrency that was measured, whether it kept the bound.

    Returns:
        The concurrency; 0 if not even the lowest measured one kept it.
    """
    lowest_failed = min((n for n, kept in met.items() if not kept), default=None)
    return max(
        (n for n, kept in met.items() if kept and (lowest_failed is None or n < lowest_failed)),
        default=0,
    )


def next_concurrency(met: Mapping[int, bool], limit: int) -> int | None:
    """What to measure next: doubled until the bound is broken, then halved in between.

    Args:
        met: For each concurrency that was measured, whether it kept the bound.
        limit: The highest concurrency to try.

    Returns:
        A concurrency not measured yet, or None: the answer is `highest_met(met)`.
    """
    low = highest_met(met)
    lowest_failed = min((n for n, kept in met.items() if not kept), default=None)
    if lowest_failed is None:
        return min(max(1, 2 * low), limit) if low < limit else None
    return (low + lowest_failed) // 2 if lowest_failed - low > 1 else None
