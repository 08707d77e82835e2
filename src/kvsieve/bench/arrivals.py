"""When conversations begin in an open loop."""

from __future__ import annotations

from random import Random


def poisson_arrivals(random: Random, rate: float, count: int) -> tuple[float, ...]:
    """Arrival times of a Poisson process, the first at 0.

    Args:
        random: Seeded; the same one gives the same times.
        rate: Mean arrivals per second.
        count: How many.

    Returns:
        Seconds since the start, in ascending order.
    """
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += random.expovariate(rate)
    return tuple(times)
