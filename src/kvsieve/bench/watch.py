"""What `/metrics` says while a load runs."""

from __future__ import annotations

import asyncio
import time

import httpx

from kvsieve.bench.schema import PoolSample
from kvsieve.serving.metrics import parse_metrics

POLL_S = 0.25
"""Between two looks: a decode step of a loaded CPU takes about as long."""

USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"


def sample(text: str, at_s: float) -> PoolSample:
    """The pool as `/metrics` describes it; what it does not mention is 0."""
    metrics = parse_metrics(text)

    def value(name: str) -> float:
        return metrics[name][0] if name in metrics else 0.0

    return PoolSample(
        at_s=at_s, kv_usage=value(USAGE), running=value(RUNNING), waiting=value(WAITING)
    )


def preemptions(text: str) -> int:
    """Preemptions since the server started, as `/metrics` counts them."""
    metrics = parse_metrics(text)
    return int(metrics[PREEMPTIONS][0]) if PREEMPTIONS in metrics else 0


async def watch(http: httpx.AsyncClient, url: str, started: float, seen: list[PoolSample]) -> None:
    """Look at `/metrics` again and again, until cancelled.

    Args:
        http: A client.
        url: The server's root.
        started: What counts as 0, in seconds of `time.perf_counter`.
        seen: Gets every sample.
    """
    while True:
        try:
            text = (await http.get(f"{url}/metrics")).text
        except httpx.HTTPError:
            pass  # The requests themselves will say so if the server is gone.
        else:
            seen.append(sample(text, time.perf_counter() - started))
        await asyncio.sleep(POLL_S)
