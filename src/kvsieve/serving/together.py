"""Requests that belong together: all of them, or none goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable


async def together(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines at the same time; the first error ends all of them, and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
